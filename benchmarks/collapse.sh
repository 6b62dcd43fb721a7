#!/usr/bin/env bash
# Template collapse, made on purpose and by this one command. A tiny model that has learned FrozenLake goes on under a
# strong KL penalty towards the warm start that it came from, whose thoughts hardly depend on the prompt; in most of its
# groups of two both members fare alike, so that only the KL has a say there. Without and with --filter snr, three seeds,
# one optimizer step an update in both. Then docs/collapse.png, and a page about all runs.
set -euo pipefail
cd "$(dirname "$0")/.."
root="${1:-runs/collapse}"

[ -e "$root"/start/*/checkpoints/40 ] || python starpo_grpo.py --run-root "$root/start"
start=$(echo "$root"/start/*/checkpoints/40)

run() {
    root=$1 start=$2 seed=$3 filter=$4
    folder="$root/$filter-$seed"
    [ -e "$folder"/*/curves.png ] && return
    rm -rf "$folder" && mkdir -p "$folder"
    OMP_NUM_THREADS=1 python starpo_grpo.py --model "$start" --ref-model tiny --kl-coef 0.3 --seed "$seed" --filter "$filter" \
        --threads 1 --group-size 2 --num-groups 32 --minibatch-size 64 --max-new-tokens 24 --learning-rate 5e-4 --updates 30 \
        --val-every 30 --run-root "$folder" > "$folder/log.txt" 2>&1 || echo "failed: $folder/log.txt"
}
export -f run

for seed in 1 2 3; do
    for filter in none snr; do
        echo "$root $start $seed $filter"
    done
done | xargs -P 2 -L 1 bash -c 'run "$@"' run
python benchmarks/signals.py "$root"/none-* "$root"/snr-*
python benchmarks/figure.py docs/collapse.png "$root"/none-*/*/ "$root"/snr-*/*/
python report.py "$root"/none-*/*/ "$root"/snr-*/*/
