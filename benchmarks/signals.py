"""Run folders -> a line for each, first -> last number: `python benchmarks/signals.py RUNS [RUNS ...]`, any folders
above them. With --seeds one line for each environment, script and filter, mean +- std over seeds."""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

FIRST = "diagnostics/first_turn/"
COLUMNS = {
    "H(Z\\|X)": FIRST + "conditional_entropy_est",
    "I(X;Z)": FIRST + "mi_seq_estimate",
    "retrieval": FIRST + "retrieval_accuracy",
    "chance": FIRST + "retrieval_chance_level",
}


def read(run_dir: Path) -> tuple[dict, str, list[dict]]:
    args = json.loads((run_dir / "args.json").read_text())
    (script,) = run_dir.glob("starpo_*.py")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return args, script.stem.removeprefix("starpo_").upper(), records


def mean(values: list[float]) -> float:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else float("nan")


def each_run(runs: list[tuple[dict, str, list[dict]]]):
    names = ["filter", "seed", "validation success", *COLUMNS, "kept share", "regime at the end"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for args, _, records in runs:
        measured = [record for record in records if "diagnostics/regime" in record]
        validated = [f"{record['val/success']:.2f}" for record in records if "val/success" in record]
        cells = [args["filter"], str(args["seed"]), " -> ".join([validated[0], validated[-1]])]
        for key in COLUMNS.values():
            ends = [f"{r[key]:.2f}" if r[key] is not None else "none" for r in (measured[0], measured[-1])]
            cells.append(" -> ".join(ends))
        cells += [f"{mean([r.get('rollout/kept_share') for r in records]):.2f}"]
        cells += [(measured[-1]["diagnostics/regime"] or "none").replace("_", " ")]
        print("| " + " | ".join(cells) + " |")


def over_seeds(runs: list[tuple[dict, str, list[dict]]]):
    """Success is that of the last validation; I(X;Z) the last one; the others are means over all updates."""
    found = defaultdict(list)
    for args, method, records in runs:
        measured = [record for record in records if record.get(COLUMNS["I(X;Z)"]) is not None]
        values = {
            "before": records[0]["val/success"],
            "after": [record for record in records if "val/success" in record][-1]["val/success"],
            "I(X;Z)": measured[-1][COLUMNS["I(X;Z)"]],
            "kept": mean([record.get("rollout/kept_share") for record in records]),
            "ratio": mean([record.get("rollout/signal_ratio") for record in records]),
            "rollout": mean([record.get("time/rollout") for record in records]),
            "train": mean([record.get("time/train") for record in records]),
            "steps": records[-1]["total/optimizer_steps"],
            "seed": args["seed"],
        }
        found[" ".join(args["env"]), method, args["filter"]].append(values)
    names = "environment | method | filter | seeds | success before | after | I(X;Z) | kept share | Std(RV)/Mean(RV)"
    names += " | optimizer steps | seconds an update: rollout | train"
    print(f"| {names} |\n|{'---|' * len(names.split('|'))}")
    for (env, method, name), results in sorted(found.items()):
        of = {key: [result[key] for result in results] for key in results[0]}
        spread = {key: statistics.stdev(values) if len(values) > 1 else 0.0 for key, values in of.items()}
        cells = [env, method, name, ", ".join(map(str, sorted(of["seed"])))]
        cells.append(f"{mean(of['before']):.3f}")
        cells += [f"{mean(of[key]):.3f} ± {spread[key]:.3f}" for key in ("after", "I(X;Z)")]
        cells += [f"{mean(of['kept']):.2f}", f"{mean(of['ratio']):.2f}", f"{mean(of['steps']):.0f}"]
        cells += [f"{mean(of['rollout']):.1f}", f"{mean(of['train']):.1f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    folders = [Path(name) for name in sys.argv[1:] if name != "--seeds"]
    done = sorted(figure.parent for folder in folders for figure in folder.rglob("curves.png"))
    runs = [run for run in map(read, done) if run[2][-1]["update"] > 0]
    (over_seeds if "--seeds" in sys.argv else each_run)(runs)
