"""The learning curve of README and docs: `python benchmarks/figure.py OUT.png RUN [RUN ...]`, one line for each run."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(out: str, runs: list[str]):
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for n, run in enumerate(sorted(runs)):
        args = json.loads((Path(run) / "args.json").read_text())
        records = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        for key, style in {"rollout/success": {"alpha": 0.25}, "val/success": {"marker": "o", "markersize": 4}}.items():
            points = [(r["update"], r[key]) for r in records if r.get(key) is not None]
            label = f"seed {args['seed']}" if key == "val/success" else None
            axis.plot(*zip(*points, strict=True), color=f"C{n}", label=label, **style)
    axis.set(xlabel="update", ylabel="share of successful episodes", ylim=(0, 1))
    axis.set_title("dots: 256 fixed validation episodes; thin: training episodes", fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False)
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
