"""One HTML page about pruned models: it opens from disk, needs no network, and does not trust its input.

Names, globs and metadata may come from an untrusted folder: Jinja escapes all of them in page.html. Should one
get through anyway, the page's policy allows no script except the template's own, by its hash.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, tostring

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from corp.planning.report import STAGES, Report
from corp.planning.site_plan import SitePlan
from corp.recipe import KINDS
from corp.report import svg
from corp.report.remake import remake

PAGE = Path(__file__).with_name("page.html")
KIND_NAMES = {"mlp": "MLP", "attn": "Attention", "vo": "Values"}
REMOVED = {"mlp": "of the MLP channels", "attn": "of the Q/K dimensions", "vo": "of the value dimensions"}
BARS = ("compensated", "not compensated")
ERRORS = [f"{KIND_NAMES[kind]} error{less}" for kind in KINDS for less in ("", ", not compensated")]
RUNS = ("run", "model", "parameters", "of the dense", "MACs per sample", "of the dense", *ERRORS)
WIDTHS = ("site", "kind", "heads", "width", "kept", "removed", "rho²", "error", "not compensated", "unseen data")
HIDDEN = ("format", "version", "recipe", "earlier_plans", "command")  # of the manifest; shown elsewhere, or not useful
Cell = str | tuple[float | None, str]  # text, or a number to sort by and its text


class Table(NamedTuple):
    """A table; columns of numbers are aligned right, and the page's script sorts by its headers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def numeric(self) -> list[bool]:
        """Whether each column holds numbers only."""
        return [
            bool(self.rows) and all(not isinstance(row[i], str) for row in self.rows) for i in range(len(self.columns))
        ]


class Figure(NamedTuple):
    """A drawing, which has its own text alternative, under a title."""

    title: str
    subtitle: str
    drawing: Element


@dataclass(frozen=True)
class Run:
    """One pruned model: the name of its folder, its manifest, its report."""

    name: str
    manifest: Mapping[str, Any]
    report: Report

    def _identity(self) -> dict[str, Any]:
        base = self.manifest.get("base")
        found = base.get("identity") if isinstance(base, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def model(self) -> str:
        """The name of the dense model."""
        return str(self._identity().get("architecture") or self._identity().get("class") or self.name)

    def sites(self, kind: str) -> list[SitePlan]:
        return [site for site in self.report.plan.sites if site.kind == kind]

    def lead(self) -> str:
        """What was removed, in one sentence."""
        removed = [f"{_removed(sites):.0%} {REMOVED[kind]}" for kind in KINDS if (sites := self.sites(kind))]
        if not removed:
            return "Nothing was removed: every site keeps its width."
        return f"{' and '.join(removed)} removed, with {self.report.plan.samples} unlabelled samples and no training."

    def tiles(self) -> list[tuple[str, str, str]]:
        """(name, large text, small text) of the most important numbers."""
        tiles = []
        pairs = [pair for pair in (self.report.params, self.report.macs) if pair is not None]
        for pair, (name, before, after, _) in zip(pairs, self.report.totals(), strict=True):
            change = f"{pair[1] / max(1, pair[0]) - 1:+.1%}".replace("-", "−")
            tiles.append((name[0].upper() + name[1:], change, f"{before} → {after}"))
        for kind in KINDS:
            with_, without = _errors(self.sites(kind))
            if with_ is not None:
                tiles.append((f"{KIND_NAMES[kind]} error", f"{with_:.2%}", f"{without:.2%} without compensation"))
        return tiles

    def stages(self) -> Table:
        return Table("How long every stage was estimated to take, and took.", STAGES, self.report.stages())

    def layers(self) -> list[Figure]:
        """Bars of rho² and of the predicted error, per kind of site."""
        kinds = [kind for kind in KINDS if self.sites(kind)]
        return [draw(self.sites(kind), KIND_NAMES[kind]) for draw in (_rho2, _distortion) for kind in kinds]

    def widths(self) -> Table:
        caption = "Per site; width is per head for attention. Unseen data: how much the error grows on held-out data."
        return Table(caption, WIDTHS, [_width_row(site) for site in self.report.plan.sites])

    def environment(self) -> list[tuple[str, str]]:
        known = {key: value for key, value in self.manifest.items() if key not in HIDDEN}
        earlier = self.manifest.get("earlier_plans")
        if isinstance(earlier, list) and earlier:
            known["pruned before"] = f"{len(earlier)} time(s)"
        plan = self.report.plan
        known |= {"calibration samples": plan.samples, "dense weights fingerprint": plan.weights or None}
        return [*flat(known), *(("recipe " + key, value) for key, value in flat(plan.recipe.to_dict()))]

    def remake(self) -> list[tuple[str, str]]:
        """How to reproduce the model; timm's models by name."""
        identity = self._identity() if self._identity().get("architecture") else None
        return remake(self.name, self.manifest, identity, self.report.plan)


def curves(title: str, y: str, series: Sequence[svg.Series], shown: Callable[[float], str]) -> Figure:
    """Lines over the share removed."""
    said = "; ".join(
        f"{name}: " + ", ".join(f"{x:.0%} removed {shown(value)}" for x, value in points) for name, points, _ in series
    )
    return Figure(title, "", svg.line_chart(f"{title}. {said}", series, ("removed, share of the width", y), shown))


@dataclass(frozen=True)
class Study:
    """Measurements at several sparsities: a sweep, or the demo."""

    name: str
    note: str
    charts: Sequence[Figure]
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def table(self) -> Table:
        return Table("The numbers.", self.columns, self.rows)


def page(runs: Sequence[Run], studies: Sequence[Study] = ()) -> str:
    """The whole page, in ASCII, so that its encoding is never misread."""
    template = PAGE.read_text(encoding="utf-8")
    script = template.split("<script>")[1].split("</script>")[0]
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["drawn"] = lambda drawing: Markup(tostring(drawing, encoding="unicode"))
    text = environment.from_string(template).render(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=runs[0].model if len(runs) == 1 else f"{len(runs)} pruned models" if runs else studies[0].name,
        versions=sorted({str(run.manifest.get("corp", "")) for run in runs} - {""}),
        runs=runs,
        studies=studies,
        compared=Table("The runs; errors are averages over their sites.", RUNS, [_compared(run) for run in runs]),
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()


def _compared(run: Run) -> list[Cell]:
    row: list[Cell] = [run.name, run.model]
    for pair in (run.report.params, run.report.macs):
        row += [(None, "–")] * 2 if pair is None else [_whole(pair[1]), _percent(pair[1] / max(1, pair[0]), 1)]
    return row + [_percent(value) for kind in KINDS for value in _errors(run.sites(kind))]


def _removed(sites: Sequence[SitePlan]) -> float:
    return 1 - sum(s.keep * len(s.kept) for s in sites) / sum(s.width * len(s.kept) for s in sites)


def _errors(sites: Sequence[SitePlan]) -> tuple[float | None, float | None]:
    """The predicted error, compensated and not, averaged over the sites."""
    if not sites:
        return None, None
    with_, without = zip(*((site.relative_error, site.relative_uncompensated) for site in sites), strict=True)
    return sum(with_) / len(sites), sum(without) / len(sites)


def _rho2(sites: Sequence[SitePlan], kind: str) -> Figure:
    numbers = [((site.rho2,), (f"{site.rho2:.3f}",)) for site in sites]
    return _bars(f"rho², {kind}", "longer is better", sites, numbers, ("rho²",), top=1.0)


def _distortion(sites: Sequence[SitePlan], kind: str) -> Figure:
    pairs = [(site.relative_error, site.relative_uncompensated) for site in sites]
    numbers = [(pair, tuple(f"{value:.2%}" for value in pair)) for pair in pairs]
    return _bars(f"Predicted error, {kind}", "shorter is better", sites, numbers, BARS)


def _bars(
    title: str, hint: str, sites: Sequence[SitePlan], numbers: Any, names: Sequence[str], **options: Any
) -> Figure:
    labels, common = short_names(sites)
    entries = [svg.Entry(label, s.name, *pair) for label, s, pair in zip(labels, sites, numbers, strict=True)]
    said = "; ".join(f"{entry.name}: {' against '.join(entry.texts)}" for entry in entries)
    return Figure(title, f"{common}; {hint}", svg.bar_chart(f"{title}. {said}", entries, names, **options))


def short_names(sites: Sequence[SitePlan]) -> tuple[list[str], str]:
    """The differing parts of the names and their pattern: blocks.0.mlp, blocks.1.mlp are 0, 1 of blocks.*.mlp."""
    names = [site.name.split(".") for site in sites]
    if len(names) < 2 or len({len(name) for name in names}) > 1:
        return [site.name for site in sites], "site names as in the model"
    varies = [len(set(parts)) > 1 for parts in zip(*names, strict=True)]
    labels = [".".join(part for part, differs in zip(name, varies, strict=True) if differs) for name in names]
    return labels, ".".join("*" if differs else part for part, differs in zip(names[0], varies, strict=True))


def _width_row(s: SitePlan) -> list[Cell]:
    row: list[Cell] = [s.name, s.kind, _whole(s.heads) if s.heads else (None, "–"), _whole(s.width), _whole(s.keep)]
    row += [_percent(s.achieved, 1), (s.rho2, f"{s.rho2:.3f}"), _percent(s.relative_error)]
    held = any(cost.held is not None for cost in s.costs)
    return [*row, _percent(s.relative_uncompensated), (s.overfit, f"+{s.overfit:.0%}") if held else (None, "–")]


def _percent(value: float | None, digits: int = 2) -> Cell:
    return (None, "–") if value is None else (value, f"{value:.{digits}%}")


def _whole(value: int) -> Cell:
    return float(value), f"{value:,}".replace(",", " ")


def flat(content: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested objects as one list of names and values."""
    found: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            found += flat(value, f"{name} › ")
        else:
            found.append((name, "–" if value in (None, "", {}, [], ()) else str(value)))
    return found
