#!/usr/bin/env bash
# The table of presets in benchmarks/cpu.md, by this one command: every preset on FrozenLake and Sokoban, three seeds,
# the tiny model, two runs at a time with one thread each. A second call goes on with what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-runs/presets}"

run() {
    root=$1 env=$2 seed=$3 script=$4 preset=$5
    folder="$root/$env-$preset-$seed"
    [ -e "$folder"/*/curves.png ] && return
    rm -rf "$folder" && mkdir -p "$folder"
    OMP_NUM_THREADS=1 python "starpo_$script.py" --preset "$preset" --env "$env" --seed "$seed" --threads 1 --num-groups 8 \
        --minibatch-size 16 --val-every 40 \
        --run-root "$folder" > "$folder/log.txt" 2>&1 || echo "failed: $folder/log.txt"
}
export -f run

# The tiny models first, so that no two runs make one at the same time.
for env in frozen_lake sokoban; do
    python starpo_grpo.py --env "$env" --updates 0 --val-episodes 1 --run-root "$root/warm-start" > /dev/null
done
for env in frozen_lake sokoban; do
    for seed in 1 2 3; do
        for method in "ppo starpo" "ppo starpo-s" "ppo ppo" "grpo grpo" "grpo dapo" "grpo dr-grpo" "grpo rloo"; do
            echo "$root $env $seed $method"
        done
    done
done | xargs -P 2 -L 1 bash -c 'run "$@"' run
python benchmarks/table.py "$root"
