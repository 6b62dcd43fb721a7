"""Run folders -> the table of benchmarks/cpu.md. `python benchmarks/table.py FOLDER_OF_RUNS`"""

import json
import sys
from pathlib import Path


def row(run_dir: Path) -> str:
    args = json.loads((run_dir / "args.json").read_text())
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    validated = [record for record in records if "val/success" in record]
    before, after = validated[0], validated[-1]
    minutes = records[-1]["time/total"] / 60
    rise = after["val/success"] - before["val/success"]
    cells = [
        args["env"], args["seed"], f"{before['val/success']:.3f}", f"{after['val/success']:.3f}", f"{rise:+.3f}",
        f"{after['val/turns']:.1f}", after["update"], f"{after['total/tokens'] / 1000:.0f}k", f"{minutes:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    print("| environment | seed | before | after | rise | turns an episode | updates | sampled tokens | minutes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for run_dir in sorted(Path(sys.argv[1]).iterdir(), key=lambda path: path.stat().st_mtime):
        print(row(run_dir))
