"""Run folders -> the tables of benchmarks/cpu.md: `python benchmarks/table.py RUNS`, with RUNS any folder above them.
A line for each environment and method; success as mean +- std over seeds, the std of one seed left out."""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path


def read(run_dir: Path) -> tuple[tuple[str, str], dict]:
    args = json.loads((run_dir / "args.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validated = [record for record in records if "val/success" in record]
    (script,) = run_dir.glob("starpo_*.py")
    method = f"{script.stem.removeprefix('starpo_').upper()} {args['preset'] or ''}".strip()
    return (" ".join(args["env"]), method), {
        "seed": args["seed"],
        "before": validated[0]["val/success"],
        "after": validated[-1]["val/success"],
        "turns": validated[-1]["val/turns"],
        "tokens": records[-1]["total/tokens"] / 1000,
        "steps": records[-1]["total/optimizer_steps"],
        "minutes": records[-1]["time/total"] / 60,
        "updates": records[-1]["update"],
    }


def spread(values: list[float]) -> str:
    text = f"{statistics.mean(values):.3f}"
    return f"{text} ± {statistics.stdev(values):.3f}" if len(values) > 1 else text


if __name__ == "__main__":
    runs = defaultdict(list)
    for figure in sorted(Path(sys.argv[1]).rglob("curves.png")):  # of runs that are done
        key, result = read(figure.parent)
        if result["updates"] > 0:
            runs[key].append(result)
    names = "environment | method | seeds | before | after | rise | turns | optimizer steps | sampled tokens | minutes"
    print(f"| {names} |\n|{'---|' * len(names.split('|'))}")
    for (env, method), results in runs.items():
        of = {name: [result[name] for result in results] for name in results[0]}
        rise = statistics.mean(of["after"]) - statistics.mean(of["before"])
        cells = [
            env, method, ", ".join(map(str, sorted(of["seed"]))), spread(of["before"]), spread(of["after"]),
            f"{rise:+.3f}", f"{statistics.mean(of['turns']):.1f}", f"{statistics.mean(of['steps']):.0f}",
            f"{statistics.mean(of['tokens']):.0f}k", f"{statistics.mean(of['minutes']):.1f}",
        ]  # fmt: skip
        print("| " + " | ".join(cells) + " |")
