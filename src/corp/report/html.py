"""One HTML page about pruned models: opens from disk, asks no network, and trusts nothing it was given.

Names, globs and metadata may come from a stranger's folder: every one of them passes through `escape`. Should one
slip through all the same, the page's policy runs no script but the template's own, by its hash.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from corp.api import TOTALS, Report
from corp.planning.plan import SitePlan
from corp.recipe import KINDS
from corp.report import svg
from corp.report.elements import Cell, facts, figure, figures, flat, heading, note, percent, table, tile, whole
from corp.report.remake import remake

PAGE = Path(__file__).with_name("page.html")
KIND_NAMES = {"mlp": "MLP", "attn": "Attention", "vo": "Values"}
REMOVED = {"mlp": "of the MLP channels", "attn": "of the Q/K dimensions", "vo": "of the value dimensions"}
ERROR_NOTE = (
    "Error is the predicted squared error of a site's output relative to its energy, on the calibration data and with "
    "the dense model's inputs; it does not say how errors add up over layers. rho² is the share of what was removed "
    "that the kept part predicts."
)
BARS = ("compensated", "not compensated")


@dataclass(frozen=True)
class Run:
    """One pruned model: what its folder is called, what its manifest says, what was done."""

    name: str
    manifest: Mapping[str, Any]
    report: Report

    @property
    def model(self) -> str:
        base = self.manifest.get("base")
        identity = base.get("identity") if isinstance(base, dict) else None
        known = identity if isinstance(identity, dict) else {}
        return str(known.get("architecture") or known.get("class") or self.name)

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """How timm builds the dense model, if it is one of timm's."""
        base = self.manifest.get("base")
        found = base.get("identity") if isinstance(base, dict) else None
        return found if isinstance(found, dict) and found.get("architecture") else None

    def sites(self, kind: str) -> list[SitePlan]:
        return [site for site in self.report.plan.sites if site.kind == kind]


@dataclass(frozen=True)
class Chart:
    """Lines over the share removed."""

    title: str
    y: str
    series: Sequence[svg.Series]
    shown: Callable[[float], str]


@dataclass(frozen=True)
class Study:
    """Measurements at several sparsities: a sweep, or the demo."""

    name: str
    note: str
    charts: Sequence[Chart]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def page(runs: Sequence[Run], studies: Sequence[Study] = ()) -> str:
    """The whole page, in ASCII, so that no reader and no locale can get its encoding wrong."""
    template = PAGE.read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = runs[0].model if len(runs) == 1 else f"{len(runs)} pruned models" if runs else studies[0].name
    body = "\n".join(_body(title, runs, studies))
    text = Template(template).substitute(policy=policy, title=escape(f"{title} – corp report"), body=body)
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _body(title: str, runs: Sequence[Run], studies: Sequence[Study]) -> list[str]:
    curves = [part for study in studies for part in _study(study)]
    head = ['<header><p class="kicker">corp report</p>', f"<h1>{escape(title)}</h1>"]
    if len(runs) == 1:
        return [*head, *_summary(runs[0]), "</header>", *_details(runs[0], 2, curves), _footer(runs)]
    if runs:
        head += [_compared(runs), note(ERROR_NOTE)]
    articles = []
    for run in runs:
        heading = f"<h2>{escape(run.name)}</h2>"
        articles += ["<article>", heading, *_summary(run), *_details(run, 3, []), "</article>"]
    return [*head, "</header>", *curves, *articles, _footer(runs)]


def _footer(runs: Sequence[Run]) -> str:
    versions = sorted({str(run.manifest.get("corp", "")) for run in runs} - {""})
    made = f"Made with corp {', '.join(versions)}. " if versions else "Made with corp. "
    return f'<footer class="note">{escape(made)}This page holds everything it shows and needs no network.</footer>'


def _compared(runs: Sequence[Run]) -> str:
    columns = ("run", "model", "parameters", "of the dense", "MACs per sample", "of the dense")
    errors = tuple(f"{KIND_NAMES[kind]} error{less}" for kind in KINDS for less in ("", ", not compensated"))
    rows: list[list[Cell]] = []
    for run in runs:
        row: list[Cell] = [run.name, run.model, *_after(run.report.params), *_after(run.report.macs)]
        rows.append(row + [percent(value) for kind in KINDS for value in _errors(run.sites(kind))])
    return table("The runs; errors are averages over their sites.", columns + errors, rows)


def _after(pair: tuple[int, int] | None) -> tuple[Cell, Cell]:
    if pair is None:
        return whole(None), percent(None)
    return whole(pair[1]), percent(pair[1] / max(1, pair[0]), 1)


def _summary(run: Run) -> list[str]:
    plan = run.report.plan
    removed = [f"{_removed(sites):.0%} {REMOVED[kind]}" for kind in KINDS if (sites := run.sites(kind))]
    what = f"{' and '.join(removed)} removed" if removed else "Nothing was removed: every site keeps its width"
    how = f", with {plan.samples} unlabelled samples and no training." if removed else "."
    return [f'<p class="lead">{escape(what + how)}</p>', '<dl class="tiles">', *_tiles(run), "</dl>"]


def _removed(sites: Sequence[SitePlan]) -> float:
    return 1 - sum(s.keep * len(s.kept) for s in sites) / sum(s.width * len(s.kept) for s in sites)


def _errors(sites: Sequence[SitePlan]) -> tuple[float | None, float | None]:
    """The average over sites, compensated and not."""
    if not sites:
        return None, None
    pairs = [(site.relative_error, site.relative_uncompensated) for site in sites]
    with_, without = (sum(values) / len(sites) for values in zip(*pairs, strict=True))
    return with_, without


def _tiles(run: Run) -> list[str]:
    pairs = {"Parameters": run.report.params, "MACs per sample": run.report.macs}
    tiles = []
    for (name, pair), row in zip(pairs.items(), run.report.totals(), strict=False):
        change = pair[1] / max(1, pair[0]) - 1 if pair else 0.0
        tiles.append(tile(name, f"{change:+.1%}".replace("-", "−"), f"{row[1]} → {row[2]}"))
    for kind in KINDS:
        with_, without = _errors(run.sites(kind))
        if with_ is not None and without is not None:
            tiles.append(tile(f"{KIND_NAMES[kind]} error", f"{with_:.2%}", f"{without:.2%} without compensation"))
    return tiles


def _details(run: Run, level: int, curves: Sequence[str]) -> list[str]:
    """Everything about one run below its summary; `level` is that of its headings."""
    parts = [heading(level, "Before and after"), figures([_before_after(run), _totals(run)]), *curves]
    if run.report.plan.sites:
        layers = [chart for draw in (_rho2, _distortion) for kind in KINDS if (chart := draw(run.sites(kind), kind))]
        parts += [heading(level, "Layer by layer"), note(ERROR_NOTE), figures(layers)]
        if run.sites("attn"):
            parts += [heading(level, "Head by head"), figures(_heads(run.sites("attn")))]
        parts += [heading(level, "Widths"), _widths(run.report.plan.sites)]
    parts += [heading(level, "Environment and data"), facts(_environment(run))]
    return [*parts, heading(level, "Make it again"), *remake(run.name, run.manifest, run.identity, run.report.plan)]


def _totals(run: Run) -> str:
    rows: list[list[Cell]] = []
    for pair, (name, *texts) in zip((run.report.params, run.report.macs), run.report.totals(), strict=False):
        values = (*pair, pair[1] / max(1, pair[0])) if pair else ()
        rows.append([name, *zip(map(float, values), texts, strict=True)])
    return table("The whole model.", ["quantity", *TOTALS[1:]], rows)


def _before_after(run: Run) -> str:
    rows = []
    for pair, (name, before, after, _) in zip((run.report.params, run.report.macs), run.report.totals(), strict=False):
        kept = pair[1] / max(1, pair[0]) if pair else 0.0
        rows.append(svg.Row(name, name, (kept, 1.0), (after, before)))
    label = "; ".join(f"{row.name} {row.texts[1]} before, {row.texts[0]} after" for row in rows)
    return figure("Size and work", "", svg.bar_chart(f"Bars: {label}", rows, ("after", "before"), top=1.0))


def _rho2(sites: Sequence[SitePlan], kind: str) -> str:
    if not sites:
        return ""
    labels, common = short_names(sites)
    rows = [svg.Row(label, s.name, (s.rho2,), (f"{s.rho2:.3f}",)) for label, s in zip(labels, sites, strict=True)]
    title = f"rho², {KIND_NAMES[kind]}"
    return figure(title, f"{common}; longer is better", svg.bar_chart(_said(title, rows), rows, ("rho²",), top=1.0))


def _distortion(sites: Sequence[SitePlan], kind: str) -> str:
    if not sites:
        return ""
    labels, common = short_names(sites)
    pairs = [(s.relative_error, s.relative_uncompensated) for s in sites]
    rows = [
        svg.Row(label, s.name, pair, [f"{v:.2%}" for v in pair])
        for label, s, pair in zip(labels, sites, pairs, strict=True)
    ]
    title = f"Predicted error, {KIND_NAMES[kind]}"
    return figure(title, f"{common}; shorter is better", svg.bar_chart(_said(title, rows), rows, BARS))


def _said(title: str, rows: Sequence[svg.Row]) -> str:
    """A bar chart in words."""
    return f"{title}. " + "; ".join(f"{row.name}: {' against '.join(row.texts)}" for row in rows)


def _heads(sites: Sequence[SitePlan]) -> list[str]:
    """Two maps of layers by heads."""
    labels, common = short_names(sites)
    rho2 = [[cost.rho2 for cost in site.costs] for site in sites]
    error = [[cost.J / cost.energy if cost.energy > 0 else 0.0 for cost in site.costs] for site in sites]
    worst = max(max(values) for values in error)
    maps = []
    for title, values, top, ends in (
        ("rho² per head, in %", rho2, 1.0, ("0", "100: all predicted")),
        ("Predicted error per head, in %", error, worst, ("0", f"{100 * worst:.1f}: the largest here")),
    ):
        texts = [[_cell(100 * v) for v in line] for line in values]
        rows = [svg.Row(*row) for row in zip(labels, [s.name for s in sites], values, texts, strict=True)]
        said = f"{title}. " + "; ".join(f"{row.name}: {', '.join(row.texts)}" for row in rows)
        maps.append(figure(title, common, svg.heat_map(said, rows, top=top, ends=ends)))
    return maps


def _cell(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"


def short_names(sites: Sequence[SitePlan]) -> tuple[list[str], str]:
    """What tells the sites apart, and the pattern they share: blocks.0.mlp, blocks.1.mlp are 0, 1 of blocks.*.mlp."""
    names = [site.name.split(".") for site in sites]
    if len(names) < 2 or len({len(name) for name in names}) > 1:
        return [site.name for site in sites], "site names as in the model"
    varies = [len(set(parts)) > 1 for parts in zip(*names, strict=True)]
    labels = [".".join(part for part, differs in zip(name, varies, strict=True) if differs) for name in names]
    return labels, ".".join("*" if differs else part for part, differs in zip(names[0], varies, strict=True))


def _widths(sites: Sequence[SitePlan]) -> str:
    columns = ("site", "kind", "heads", "width", "kept", "removed", "rho²", "error", "not compensated", "unseen data")
    rows: list[list[Cell]] = []
    for s in sites:
        heads: Cell = (float(s.heads), str(s.heads)) if s.heads else (None, "–")
        widths: list[Cell] = [(float(s.width), str(s.width)), (float(s.keep), str(s.keep)), percent(s.achieved, 1)]
        costs: list[Cell] = [percent(s.relative_error), percent(s.relative_uncompensated)]
        unseen: Cell = (s.overfit, f"+{s.overfit:.0%}") if any(c.held is not None for c in s.costs) else (None, "–")
        rows.append([s.name, s.kind, heads, *widths, (s.rho2, f"{s.rho2:.3f}"), *costs, unseen])
    caption = (
        "Per site; width is per head for attention. Unseen data: how much larger the error is where nothing was fitted."
    )
    return table(caption, columns, rows)


def _environment(run: Run) -> list[tuple[str, str]]:
    hidden = ("format", "version", "recipe", "earlier_plans", "command")
    known = {key: value for key, value in run.manifest.items() if key not in hidden}
    earlier = run.manifest.get("earlier_plans")
    if isinstance(earlier, list) and earlier:
        known["pruned before"] = f"{len(earlier)} time(s)"
    plan = run.report.plan
    known |= {"calibration samples": plan.samples, "dense weights fingerprint": plan.weights or None}
    return [*flat(known), *(("recipe " + key, value) for key, value in flat(plan.recipe.to_dict()))]


def _study(study: Study) -> list[str]:
    drawn = []
    for chart in study.charts:
        said = "; ".join(
            f"{name}: " + ", ".join(f"{x:.0%} removed {chart.shown(y)}" for x, y in points)
            for name, points in chart.series
        )
        axes = ("removed, share of the width", chart.y)
        drawn.append(figure(chart.title, "", svg.line_chart(f"{chart.title}. {said}", chart.series, axes, chart.shown)))
    numbers = table("The numbers.", study.columns, study.rows)
    shown = [figures([*drawn, numbers])] if len(drawn) == 1 else [figures(drawn), numbers]
    return [heading(2, study.name), note(study.note), *shown]
