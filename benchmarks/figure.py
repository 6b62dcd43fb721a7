"""The learning curves of README and docs: `python benchmarks/figure.py OUT.png RUN [RUN ...]`.

Success, H(Z|X) and I(X;Z). A colour for each of --env, filter or seed in which the runs differ: runs that differ in
their filter are told apart by it, others by their seed.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = {
    "success, share of episodes": ("rollout/success", "val/success"),
    "H(Z|X), nats per token": (None, "diagnostics/first_turn/conditional_entropy_est"),
    "I(X;Z), nats": (None, "diagnostics/first_turn/mi_seq_estimate"),
}


def main(out: str, folders: list[str]):
    runs = []
    for folder in sorted(folders):
        args = json.loads((Path(folder) / "args.json").read_text())
        runs.append((args, [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]))
    by_filter = len({args["filter"] for args, _ in runs}) > 1
    labels = [f"--filter {args['filter']}" if by_filter else f"seed {args['seed']}" for args, _ in runs]
    colours = {label: f"C{n}" for n, label in enumerate(dict.fromkeys(labels))}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 3), layout="constrained")
    for axis, (title, (thin, dotted)) in zip(axes, PANELS.items(), strict=True):
        seen = set()
        for label, (_, records) in zip(labels, runs, strict=True):
            # Runs without validation have the training episodes alone.
            keys = [(thin, {"alpha": 0.3}), (dotted, {"marker": "o", "markersize": 3})]
            for key, style in keys:
                points = [(r["update"], r[key]) for r in records if r.get(key) is not None]
                if points:
                    named = {} if label in seen or key == thin else {"label": label}
                    axis.plot(*zip(*points, strict=True), color=colours[label], linewidth=1.2, **style, **named)
                    seen |= {label} if named else set()
        axis.set_title(title, fontsize=9, loc="left")
        axis.set(xlabel="update", ylim=(0, 1) if "success" in title else None)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
