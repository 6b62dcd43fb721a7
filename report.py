"""The run folder: written by a run, and turned into pictures. `python report.py RUN` writes RUN/curves.png.

Whatever is written is complete or absent at any moment: a run may be killed in the middle of a line.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.text import Text

# One panel each: title, unit of the y axis, and the metrics in it with their labels.
PANELS = [
    ("success", "share of episodes", {"rollout/success": "training, sampled as trained", "val/success": "validation"}),
    ("return", "reward per episode", {"rollout/return": "training", "val/return": "validation"}),
    ("spread inside a group", "std of the return", {"rollout/in_group_std": "mean over groups"}),
    ("policy entropy", "nats per token", {"policy/entropy": "sampled tokens"}),
]


def append_line(path: Path, record: dict):
    """One JSON object on a line of its own. A number that could not be had is null; "notes" says why."""
    clean = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in record.items()}
    with path.open("a") as file:
        file.write(json.dumps(clean) + "\n")  # in ASCII: some characters that a model writes would end the line


def cut_lines(path: Path, last_update: int):
    """Drops the lines after `last_update`, and one that was half written when the run was killed."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["update"] <= last_update:
            kept.append(line + "\n")
    write_file(path, "".join(kept))


def write_file(path: Path, text: str):
    """All of it or nothing: the file gets its name only when complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def commit() -> str:
    """The commit of the code that runs, with "-dirty" where files differ from it; "" outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:  # no git
        return ""


def save_checkpoint(run_dir: Path, update: int, model, tokenizer, trainer_state: dict, keep: int):
    """A plain Hugging Face folder, plus trainer.pt. It gets its name only when complete: none is ever half written."""
    folder = run_dir / "checkpoints"
    temporary = folder / f".{update}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save(trainer_state, temporary / "trainer.pt")
    final = folder / str(update)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in checkpoints(run_dir)[:-keep] if keep else []:
        shutil.rmtree(old)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def start_tracking(run_dir: Path, project: str, config: dict, console):
    """A Weights & Biases run; offline without an account or a network, so that tracking never stops training."""
    import wandb

    run = dict(project=project, name=run_dir.name, dir=str(run_dir), config=config)
    mode = os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False)):
        mode = "offline"
    try:
        return wandb.init(**run, mode=mode, settings=wandb.Settings(init_timeout=30))
    except wandb.errors.Error as error:
        console.print(f"[yellow]wandb: {error}; tracking offline[/]")
        return wandb.init(**run, mode="offline")


def print_trajectory(trajectory, tokenizer, console):
    """The tokens of an episode as the model saw them; those that are trained stand out."""
    text = Text()
    for n, sample in enumerate(trajectory.samples):
        text.append(f"\n-- sample {n + 1}\n" if n else "")
        for token, trained in zip(sample.ids, sample.loss_mask, strict=True):
            text.append(tokenizer.decode([token]), style="bold black on green" if trained else "dim")
    console.rule(f"group {trajectory.group}, member {trajectory.member}: tokens on green are trained")
    console.print(text)
    console.rule(
        f"return {sum(trajectory.rewards):g}, penalty {sum(trajectory.penalties):g}, ended: {trajectory.ended}"
    )


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
