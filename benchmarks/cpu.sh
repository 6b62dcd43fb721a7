#!/usr/bin/env bash
# The first table of benchmarks/cpu.md, by this one command, on a quiet machine without a GPU. The first run of an
# environment makes its tiny model; STARPO_CACHE points to an empty folder, so that this is in the minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export STARPO_CACHE="${STARPO_CACHE:-$(mktemp -d)}"
root="${1:-runs/benchmark}"

for seed in 1 2 3; do
    python starpo_ppo.py --seed "$seed" --run-root "$root/ppo"
    python starpo_grpo.py --seed "$seed" --run-root "$root/grpo"
done
python starpo_grpo.py --env bandit --run-root "$root/grpo"
python benchmarks/table.py "$root"
for script in ppo grpo; do
    python benchmarks/figure.py "docs/frozen_lake_$script.png" "$root/$script"/frozen_lake-*
done
