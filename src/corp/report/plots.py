"""Pictures (matplotlib, drawn to files; no window is ever opened)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

# Okabe-Ito: told apart by everybody; markers tell them apart in print.
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "v", "D", "^", "P")


def accuracy_curve(curves: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, title: str) -> None:
    """Accuracy against sparsity, one line per way of pruning; points are (share removed, accuracy)."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for (label, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        x, y = zip(*points, strict=True)
        axes.plot([100 * v for v in x], [100 * v for v in y], color=colour, marker=marker, label=label)
    axes.set(xlabel="removed, % of MLP channels and Q/K dimensions", ylabel="top-1 accuracy, %", ylim=(0, 102))
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
