#!/usr/bin/env bash
# The table of filters in benchmarks/cpu.md, by this one command: with and without --filter snr, both scripts, slippery
# FrozenLake and Sokoban, three seeds, the tiny model, two runs at a time with one thread each. A second call goes on
# with what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-runs/filters}"

run() {
    root=$1 env=$2 seed=$3 script=$4 filter=$5
    folder="$root/$env-$script-$filter-$seed"
    [ -e "$folder"/*/curves.png ] && return
    rm -rf "$folder" && mkdir -p "$folder"
    OMP_NUM_THREADS=1 python "starpo_$script.py" --filter "$filter" --env "$env" --seed "$seed" --threads 1 --num-groups 8 \
        --minibatch-size 16 --val-every 40 \
        --run-root "$folder" > "$folder/log.txt" 2>&1 || echo "failed: $folder/log.txt"
}
export -f run

# The tiny models first, so that no two runs make one at the same time.
for env in SlipperyFrozenLake sokoban; do
    python starpo_grpo.py --env "$env" --updates 0 --val-episodes 1 --run-root "$root/warm-start" > /dev/null
done
for seed in 1 2 3; do
    for env in SlipperyFrozenLake sokoban; do
        for script in grpo ppo; do
            for filter in none snr; do
                echo "$root $env $seed $script $filter"
            done
        done
    done
done | xargs -P 2 -L 1 bash -c 'run "$@"' run
python benchmarks/signals.py --seeds "$root"
