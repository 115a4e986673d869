"""Charts of a sweep's rows: lines and bars whose labels name only what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from corp.recipe import KINDS, TOGETHER
from corp.report import svg

Row = Mapping[str, Any]
Lines = dict[str, list[tuple[float, float]]]


class Metric(NamedTuple):
    """How a column of a sweep is shown: the chart's title, its axis, and whether it is a share of one."""

    title: str
    axis: str
    share: bool = True


METRICS = {  # best first
    "top1": Metric("Accuracy against sparsity", "top-1 accuracy"),
    "perplexity": Metric("Perplexity against sparsity", "perplexity", share=False),
    "cosine": Metric("Likeness to the dense embedding", "cosine to the dense embedding"),
    "agreement": Metric("Same answer as the dense model", "agreement with the dense model"),
    "kl": Metric("Distance from the dense model", "KL divergence, nats", share=False),
    "mlp error": Metric("Predicted error, MLP", "predicted error of the MLPs"),
    "attn error": Metric("Predicted error, Attention", "predicted error of the attention logits"),
    "vo error": Metric("Predicted error, Values", "predicted error of the attention outputs"),
}
KIND_LABELS = {"mlp": "MLP", "attn": "attention", "vo": "values", "both": "both", "all": "all"}


def number(value: object) -> float | None:
    """A number that can be drawn, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e15:
        return None
    return float(value)


def sparsity(row: Row) -> float | None:
    shares = [number(row.get(kind, 0)) for kind in KINDS]
    known = [share for share in shares if share is not None]
    return max(known) if len(known) == len(shares) else None


def kind(row: Row) -> str:
    """What a row prunes, by its name in sweeps."""
    pruned = tuple(kind for kind in KINDS if row.get(kind))
    return next((name for name, kinds in TOGETHER.items() if kinds == pruned), "all" if pruned else "both")


def settings(row: Row) -> dict[str, str]:
    """The other settings that identify a row, in words."""
    return {
        "kind": KIND_LABELS[kind(row)],
        "preset": f"preset {row.get('preset', '?')}",
        "rank": f"ranking {row.get('rank', '?')}",
        "compensate": f"compensation {row.get('compensate', '?')}",
        "ridge": f"ridge {row.get('ridge', '?')}",
        "samples": f"{row.get('samples', '?')} samples",
    }


def lines(rows: Sequence[Row], metric: str, *, over: str = "sparsity") -> Lines:
    """(x, y) of every row, over sparsity or samples, with one line per combination of the other settings."""
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        share, y = sparsity(row), number(row.get(metric))
        x = share if over == "sparsity" else number(row.get(over))
        if share is None or x is None or y is None:
            continue
        rest = {key: label for key, label in settings(row).items() if key != over}
        key = tuple(rest.values()) if over == "sparsity" else (f"{share:.0%}", *rest.values())
        found.setdefault(key, []).append((x, y))
    labels = varying(list(found))
    return {label: sorted(points) for label, points in zip(labels, found.values(), strict=True)}


def varying(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """A label for each key, with only the parts in which keys differ."""
    differs = [len(set(parts)) > 1 for parts in zip(*keys, strict=True)]
    return [", ".join(p for p, d in zip(key, differs, strict=True) if d) or ", ".join(key) for key in keys]


def ranking(rows: Sequence[Row], metric: str) -> tuple[dict[str, dict[str, float]], str]:
    """metric[compensation][ranking] and a title: both kinds at the sparsity nearest to 50 %, as the paper compares."""
    some = [row for row in rows if kind(row) == "both" and number(row.get(metric)) is not None] or list(rows)
    share = min({s for row in some if (s := sparsity(row)) is not None}, key=lambda s: abs(s - 0.5), default=0.0)
    bars: dict[str, dict[str, float]] = {}
    for row in some:
        y = number(row.get(metric))
        if sparsity(row) == share and y is not None:
            bars.setdefault(f"compensation {row.get('compensate')}", {})[str(row.get("rank"))] = y
    return bars, f"rankings at {share:.0%}, {KIND_LABELS[kind(some[0])]}"


def draw(rows: Sequence[Row], dense: Row, folder: Path, title: str) -> list[str]:
    """Write charts of what varies between these rows, as SVG; return the names of the files."""
    there = (name for name in METRICS if any(number(row.get(name)) is not None for row in rows))
    metric = next(there, None)
    if metric is None:
        return []
    (_, axis, share), whole = METRICS[metric], number(dense.get(metric))
    shown = percents if share else decimals
    charts = {}

    def varies(get: Any) -> bool:
        return len({get(row) for row in rows}) > 1

    def curves(x: str, x_shown: Any, **over: str) -> Element:
        series = [svg.Series(name, points) for name, points in lines(rows, metric, **over).items()]
        last = max((x for line in series for x, _ in line.points), default=0.0)
        ends = [] if whole is None else [svg.Series("dense", [(0.0, whole), (last, whole)])]
        return svg.line_chart(title, [*series, *ends], (x, axis), shown, x_shown)

    if varies(sparsity):
        charts["sparsity.svg"] = svg.picture(title, curves("removed", "{:.0%}".format))
    if varies(lambda row: row.get("rank")) and not varies(lambda row: row.get("preset")):
        bars, what = ranking(rows, metric)
        groups = {"dense": [whole]} if whole is not None else {}
        groups |= {
            rank: [bars[name].get(rank, 0.0) for name in bars]
            for rank in dict.fromkeys(r for b in bars.values() for r in b)
        }
        entries = [
            svg.Entry(name, name, values, [f"{v:.1%}" if share else decimals(v) for v in values])
            for name, values in groups.items()
        ]
        charts["ranking.svg"] = svg.picture(f"{title}: {axis}, {what}", svg.bar_chart(title, entries, list(bars)))
    if varies(lambda row: row.get("samples")):
        charts["calibration.svg"] = svg.picture(title, curves("calibration samples", "{:g}".format, over="samples"))
    for name, chart in charts.items():
        svg.save(chart, folder / name)
    return list(charts)


def percents(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 or value == 0 else f"{value:.1%}"


def decimals(value: float) -> str:
    return f"{value:.3g}"
