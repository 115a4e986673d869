"""The dense and the pruned model side by side, for checks that compare them, and where narrowed rows are."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from corp.calibration.statistics import Statistics
from corp.planning.plan import Plan
from corp.sites import AttentionSite, MLPSite, Rows, Site, Sites, rows_of
from corp.surgery.padded import Padded


class Both(NamedTuple):
    """A dense model, its sites and sums, and the model pruned by a plan."""

    dense: nn.Module
    pruned: nn.Module
    sites: Sites
    stats: Statistics
    plan: Plan

    @property
    def weighted(self) -> bool:
        """Whether errors of rotary pairs are attention-weighted."""
        return self.plan.recipe.weighs_pairs

    def rows(self, site: Site) -> dict[str, Rows] | None:
        """Where queries, keys and values of a narrowed attention are: in their dense order, one after the other.

        None for an MLP, or if the attention is not one of corp's own modules.
        """
        if isinstance(site, MLPSite):
            return None
        found: dict[str, Rows] = {}
        parts = self._parts(site.attention)
        for module in dict.fromkeys(rows.module for _, rows, _ in parts):
            start = 0
            for letter, rows, height in sorted((p for p in parts if p[1].module == module), key=lambda p: p[1].start):
                found[letter] = replace(rows, start=start, stop=start + height, runs=1, period=0)
                start += height
            known = {letter for letter, rows, _ in parts if rows.module == module}
            if start != self._height(found[next(iter(known))]) and "v" in known:
                return None
        return found

    def _parts(self, attention: str) -> list[tuple[str, Rows, int]]:
        """Queries, keys and values: their letter, their rows in the dense model, and how many rows are kept."""
        widths = {site_plan.name: site_plan.keep for site_plan in self.plan.sites}
        parts: list[tuple[str, Rows, int]] = []
        queries = self.sites.get(attention)
        if isinstance(queries, AttentionSite):
            keep = widths.get(attention, queries.width)
            parts += [("q", queries.q, queries.heads * keep), ("k", queries.k, queries.groups * keep)]
        values = next((one for one in self.sites.values if one.attention == attention), None)
        if queries is None and values is not None and isinstance(values.build, Padded):  # refused, but in one layer
            parts += [(letter, rows, rows.width) for letter, rows in (("q", values.build.q), ("k", values.build.k))]
        if values is not None:
            parts.append(("v", values.v, values.groups * widths.get(values.name, values.width)))
        return parts

    def _height(self, rows: Rows) -> int:
        return len(rows_of(self.pruned, replace(rows, start=0, stop=2**40)).weight)
