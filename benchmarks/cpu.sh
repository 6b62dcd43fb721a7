#!/usr/bin/env bash
# Every number of benchmarks/cpu.md, by this one command, on a quiet machine without a GPU. The first run of an
# environment makes its tiny model; STARPO_CACHE points to an empty folder, so that this is in the minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export STARPO_CACHE="${STARPO_CACHE:-$(mktemp -d)}"
root="${1:-runs/benchmark}"

for seed in 1 2 3; do
    python starpo_grpo.py --seed "$seed" --run-root "$root"
done
python starpo_grpo.py --env sokoban --run-root "$root"
python starpo_grpo.py --env bandit --run-root "$root"
python benchmarks/table.py "$root"
