"""How redundant the sites of a model are: the paper's appendix A, computed from statistics without data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from corp.calibration.grams import Grams, folds_after
from corp.calibration.site_sums import SiteSums
from corp.calibration.statistics import Statistics
from corp.errors import StatisticsError
from corp.numerics.redundancy import inactivity, redundancy
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, Sites

FOLDED = "the per-sample Grams were folded into their Kronecker sums; calibrate on at most {limit} samples to have it"


@dataclass(frozen=True)
class Redundancy:
    """The redundancy of an MLP's hidden channels, of an attention's values, or of one head's queries or keys."""

    site: str
    what: str  # mlp, vo, q or k
    head: int | None
    dim: int
    effective_rank: float
    k95_channels: int
    k95_eigenvalues: int
    sparsity: float | None = None  # of activations; not defined for queries, keys and values

    @property
    def rank_ratio(self) -> float:
        return self.effective_rank / self.dim

    def to_dict(self) -> dict[str, Any]:
        ratios = {name: getattr(self, name) / self.dim for name in ("k95_channels", "k95_eigenvalues")}
        return {**asdict(self), "rank_ratio": self.rank_ratio, **{f"{name}_ratio": r for name, r in ratios.items()}}


@dataclass
class Analysis:
    """Rows for the sites that can be analysed; `unavailable` maps the others to the reason."""

    rows: list[Redundancy] = field(default_factory=list)
    unavailable: dict[str, str] = field(default_factory=dict)

    def of(self, *what: str) -> list[Redundancy]:
        return [row for row in self.rows if row.what in what]

    def to_dict(self) -> dict[str, Any]:
        return {"rows": [row.to_dict() for row in self.rows], "unavailable": self.unavailable}


def analyze(sites: Sites, stats: Statistics, progress: Callable[[int], None] | None = None) -> Analysis:
    """One row per MLP and per attention's values, and two (queries, keys) per head of every attention."""
    analysis = Analysis()
    for site in sites:
        if isinstance(site, AttentionSite):
            _attention(site, stats, analysis)
        else:
            analysis.rows.append(_inputs(site, stats))
        if progress:
            progress(1)
    return analysis


def _inputs(site: LinearSite, stats: Statistics) -> Redundancy:
    moments = stats.moments_of(site.name).total()
    _require_width(site, site.inputs, moments.width)
    sparsity = inactivity(moments.active_share) if isinstance(site, MLPSite) else None
    return Redundancy(site.name, site.kind, None, *redundancy(moments.cov()), sparsity=sparsity)


def _attention(site: AttentionSite, stats: Statistics, into: Analysis) -> None:
    if site.rotary:
        into.unavailable[site.name] = "they are rotated by their positions, and only products of pairs are kept"
        return
    sums = stats.grams_of(site.name)
    _require_width(site, site.width, sums.fit.width)
    means = _mean_grams(sums)
    if means is None:
        into.unavailable[site.name] = FOLDED.format(limit=folds_after(sums.fit.width))
        return
    for what, grams in zip(("q", "k"), means, strict=True):
        into.rows += [Redundancy(site.name, what, head, *redundancy(gram)) for head, gram in enumerate(grams)]


def _mean_grams(sums: SiteSums[Grams]) -> tuple[Tensor, Tensor] | None:
    """Mean per-sample Grams of queries and keys, each (H, d, d); added here, because adding the sums may fold them."""
    parts = [part.gram_sums() for part in (sums.fit, sums.held) if part.samples]
    known = [part for part in parts if part is not None]
    if not parts:
        raise StatisticsError("no samples were seen at the attention sites; calibrate on some")
    if len(known) < len(parts):
        return None
    samples = sums.fit.samples + sums.held.samples
    q, k = (sum(side[1:], side[0]) / samples for side in zip(*known, strict=True))
    return q, k


def _require_width(site: Site, here: int, width: int) -> None:
    if here != width:
        raise StatisticsError(
            f"{site.name} is {here} wide in the model and {width} in the statistics; "
            "they belong to another model: calibrate this one"
        )
