"""The result of pruning in numbers: parameters and operations before and after, and every site's predicted cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from corp.io.observer import duration
from corp.io.tables import text_table
from corp.planning.plan import Plan
from corp.planning.site_plan import SitePlan

TOTALS = ("", "before", "after", "ratio")
STAGES = ("stage", "estimated", "took")


@dataclass(frozen=True)
class Report:
    """What pruning did, in numbers: print it, or use `to_dict()`. `macs` is None if the input's shape is unknown."""

    plan: Plan
    params: tuple[int, int]
    macs: tuple[int, int] | None = None
    run: Mapping[str, Any] | None = None  # seconds of every stage and peak memory in bytes, estimated and measured

    def totals(self) -> list[tuple[str, ...]]:
        """Parameters and, if known, operations per sample, under TOTALS."""
        rows = [_total("parameters", self.params, 1e6, "M")]
        if self.macs is not None:
            rows.append(_total("MACs per sample", self.macs, 1e9, "G"))
        return rows

    def stages(self) -> list[tuple[str, ...]]:
        """The estimated and measured time of every stage, under STAGES; empty if no estimate was made."""
        if self.run is None:
            return []
        rows = [(one["stage"], *_times(one)) for one in self.run["stages"]]
        both = {key: sum(one[key] for one in self.run["stages"]) for key in ("estimated", "seconds")}
        return [*rows, ("all", *_times(both))]

    def gained(self) -> str:
        """What pruning gained, in one line."""
        parts = ", ".join(f"{before} -> {after} {what} (x {ratio})" for what, before, after, ratio in self.totals())
        if self.run is None:
            return parts
        took, estimated = (sum(one[key] for one in self.run["stages"]) for key in ("seconds", "estimated"))
        return f"{parts}, in {duration(took)} (estimated: {duration(estimated)})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "params": {"before": self.params[0], "after": self.params[1]},
            "macs": None if self.macs is None else {"before": self.macs[0], "after": self.macs[1]},
            **({} if self.run is None else {"run": dict(self.run)}),
            "samples": self.plan.samples,
            "recipe": self.plan.recipe.to_dict(),
            "why": dict(self.plan.why),
            "sites": [_site_report(site) for site in self.plan.sites],
        }

    def __str__(self) -> str:
        return f"{self.plan}\n\n{text_table(TOTALS, self.totals())}"


def _times(one: Mapping[str, float]) -> tuple[str, str]:
    return duration(one["estimated"]), duration(one["seconds"])


def _site_report(site: SitePlan) -> dict[str, Any]:
    names = ("name", "kind", "heads", "width", "requested", "achieved", "rho2", "relative_error")
    content = {name: getattr(site, name) for name in (*names, "relative_uncompensated")}
    return {**content, "kept": site.keep, "groups": [asdict(cost) for cost in site.costs]}


def _total(what: str, pair: tuple[int, int], unit: float, letter: str) -> tuple[str, ...]:
    before, after = pair
    return what, f"{before / unit:.3f} {letter}", f"{after / unit:.3f} {letter}", f"{after / max(1, before):.3f}"
