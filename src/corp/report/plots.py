"""Pictures (matplotlib, drawn to files; no window is ever opened)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe-Ito: told apart by everybody; markers tell them apart in print.
COLOURS = ("#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
MARKERS = ("o", "s", "v", "D", "^", "P")
DASHES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")


def line_chart(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str,
    dense: float | None = None,
    x_percent: bool = False,
    share: bool = True,
) -> Figure:
    """One line per curve; a `share` is shown in percent; `dense` is what nothing removed would give."""
    unit = 100 if share else 1
    figure, axes = _axes(title, f"{y}, %" if share else y, None if dense is None else unit * dense)
    for number, (label, points) in enumerate(curves.items()):
        xs, ys = zip(*points, strict=True)
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
        }
        axes.plot([100 * v for v in xs] if x_percent else xs, [unit * v for v in ys], label=label, **style)
    axes.set_xlabel(f"{x}, %" if x_percent else x)
    _legend(axes, len(curves))
    return figure


def bar_chart(
    bars: Mapping[str, Mapping[str, float]], *, title: str, y: str, dense: float | None = None, share: bool = True
) -> Figure:
    """Groups of bars, one bar of each series per group: bars[series][group]; a `share` is shown in percent."""
    unit = 100 if share else 1
    figure, axes = _axes(title, f"{y}, %" if share else y, None if dense is None else unit * dense)
    groups = list(dict.fromkeys(group for series in bars.values() for group in series))
    width = 0.8 / len(bars)
    for number, (label, series) in enumerate(bars.items()):
        at = [groups.index(group) + (number - (len(bars) - 1) / 2) * width for group in series]
        style: dict[str, Any] = {
            "color": COLOURS[number % len(COLOURS)],
            "hatch": HATCHES[number % len(HATCHES)],
            "edgecolor": "white",
        }
        drawn = axes.bar(at, [unit * v for v in series.values()], width, label=label, **style)
        axes.bar_label(drawn, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    _legend(axes, len(bars))
    return figure


def save(figure: Figure, path: Path) -> list[str]:
    """PNG for slides, SVG for print, under the name `path`; the same figure gives the same bytes."""
    names = []
    with rc_context({"svg.hashsalt": "corp"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            file = path.with_suffix(suffix)
            figure.savefig(file, dpi=150, metadata=metadata)
            names.append(file.name)
    return names


def _axes(title: str, y: str, dense: float | None) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    if dense is not None:
        axes.axhline(dense, color="#666666", linestyle=":", linewidth=1.2, label="dense")
    axes.set_ylabel(y)
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.3)
    return figure, axes


def _legend(axes: Axes, entries: int) -> None:
    """Beside the lines where they are many, else where there is room."""
    if entries > 4:
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    else:
        axes.legend(frameon=False)


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
