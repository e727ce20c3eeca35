"""Draw the loss curves of a training log.

python plot.py training_log.jsonl loss_curve.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from evaluate import DOMAINS
from matplotlib import pyplot


def plot(log: Path, picture: Path) -> None:
    """The loss curves of the log."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    joint = [e for e in entries if e.get("phase") == "joint"]
    for name in ("loss", "draft1", "draft2", "draft3"):
        left.plot(
            [e["tokens"] / 1e6 for e in joint], [e[name] for e in joint], label=f"training {name}", lw=0.8
        )
    held = [e for e in entries if e.get("phase") == "validation"]
    for domain in DOMAINS:
        for split, style in (("train", "--"), ("held", "o-")):
            values = [e[f"{domain}_{split}"] for e in held]
            left.plot([e["tokens"] / 1e6 for e in held], values, style, ms=3, label=f"{domain}, {split}")
    left.set(title="1: trunk and MTP layer", xlabel="million tokens", ylabel="nats per token", ylim=(0, 6))
    draft = [e for e in entries if e.get("phase") == "draft"]
    for name in ("draft1", "draft2", "draft3"):
        right.plot([e["tokens"] / 1e6 for e in draft], [e[name] for e in draft], label=name, lw=0.8)
    right.set(
        title="2: MTP layer learns the trunk's choices",
        xlabel="million tokens",
        ylabel="soft + hard cross-entropy",
    )
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    plot(Path(sys.argv[1]), Path(sys.argv[2]))
