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


def redundancy_chart(
    layers: Mapping[str, Sequence[float]],
    heads: Mapping[str, Sequence[tuple[float, float, float]]],
    path: Path,
    *,
    title: str,
) -> None:
    """Shares per MLP, one line per measure; beside them (least, mean, most) over heads per attention, as bands."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (label, values), colour, marker in zip(layers.items(), COLOURS, MARKERS, strict=False):
        left.plot(range(len(values)), values, color=colour, marker=marker, label=label)
    for (label, bands), colour, marker in zip(heads.items(), COLOURS, MARKERS, strict=False):
        if bands:
            least, mean, most = zip(*bands, strict=True)
            right.fill_between(range(len(bands)), least, most, color=colour, alpha=0.2, linewidth=0)
            right.plot(range(len(bands)), mean, color=colour, marker=marker, label=label)
    left.set(xlabel="MLP, in the model's order", ylabel="share of the width", ylim=(0, 1.02))
    right.set(xlabel="attention, in the model's order")
    left.set_title(title, loc="left")
    right.set_title("effective rank / width, mean and range over heads", loc="left")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # clear of the lines
    figure.savefig(path, dpi=150)
