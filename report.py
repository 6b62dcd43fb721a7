"""A run folder -> pictures. `python report.py RUN` writes RUN/curves.png."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# One panel each: title, unit of the y axis, and the metrics in it with their labels.
PANELS = [
    ("success", "share of episodes", {"rollout/success": "training, sampled as trained", "val/success": "validation"}),
    ("return", "reward per episode", {"rollout/return": "training", "val/return": "validation"}),
    ("spread inside a group", "std of the return", {"rollout/in_group_std": "mean over groups"}),
    ("policy entropy", "nats per token", {"policy/entropy": "sampled tokens"}),
]


def load_metrics(run_dir: Path) -> list[dict]:
    """One record for each update; the last line is left out where a killed run wrote half of it."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def curves(run_dir: Path) -> Path:
    """Writes curves.png, one panel for each of PANELS over the updates, and returns its path."""
    records = load_metrics(run_dir)
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for axis, (title, unit, lines) in zip(axes, PANELS, strict=True):
        for key, label in lines.items():
            points = [(r["update"], r[key]) for r in records if r.get(key) is not None]
            if points:
                marker = "o" if key.startswith("val/") else None
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
        axis.set(title=title, xlabel="update", ylabel=unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    figure.suptitle(Path(run_dir).name, fontsize=9)
    path = Path(run_dir) / "curves.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python report.py RUN [RUN ...]")
    for folder in sys.argv[1:]:
        print(curves(Path(folder)))
