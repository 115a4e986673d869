"""Statistics of experts: some see too few tokens for a fit, but must be as narrow as the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from corp.calibration.moments import Moments
from corp.calibration.site_sums import AnySums, SiteSums, changed
from corp.calibration.statistics import Statistics
from corp.sites import MLPSite, Site


def supplied(stats: Statistics, sites: Iterable[Site]) -> Statistics:
    """The statistics, with uncorrelated channels for experts that saw fewer tokens than they have channels.

    Such an expert keeps the channels with the largest weights and, as far as known, energies; nothing is predicted
    from the kept channels.
    """
    routed = frozenset(site.name for site in sites if isinstance(site, MLPSite) and site.experts)

    def supply(name: str, sums: AnySums) -> AnySums:
        return filled(sums) if name in routed and isinstance(sums.fit, Moments) else sums

    return replace(stats, sums=changed(stats.sums, supply)) if routed else stats


def starved(stats: Statistics, sites: Iterable[Site]) -> list[str]:
    """A sentence that names the experts that saw too few tokens, if there are any."""
    few = [
        site.name
        for site in sites
        if isinstance(site, MLPSite) and site.experts and stats.moments_of(site.name).total().n < site.width
    ]
    if not few:
        return []
    some = ", ".join(few[:4]) + (", ..." if len(few) > 4 else "")
    return [
        f"{len(few)} experts saw fewer tokens than they have channels ({some}): they keep the channels with the "
        "largest weights and energies, and nothing compensates for the others; calibrate on more data"
    ]


def filled(sums: SiteSums[Moments]) -> SiteSums[Moments]:
    """The sums of a site if they suffice for its width, otherwise sums of uncorrelated channels."""
    total = sums.total()
    if total.n >= total.width:
        return sums
    known = total.energy if total.n else torch.ones(total.width, dtype=torch.float64)  # (D,)
    energy = (total.n * known + known.mean()) / (total.n + 1)
    alone = Moments(total.width)
    alone.n = alone.seen = max(1, total.n)
    alone.shift = torch.zeros_like(energy)
    alone.square_seen = alone.n * energy
    alone.outer = torch.diag(alone.n * energy)
    alone.active = total.active if total.n else torch.ones_like(energy)
    alone.stream = total.stream
    return SiteSums(alone, Moments(total.width))
