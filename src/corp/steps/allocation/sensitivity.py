"""How much the output minds an error at each site, measured: models in which one site alone is narrower.

Rules that guess this from the energy of the residual stream miss it by up to ten times in small language models, where
the first and the last layers matter most. A few held-out samples are enough: what is measured is how far the output
moves away from the dense one, not the difference of two distances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from corp.recipe import kept_width
from corp.sites import AttentionSite, MLPSite, Sites
from corp.steps.allocation.allocator import Allocation
from corp.steps.allocation.trials import Trials

ANSWERS, SAMPLES = 1024, 32  # of the held-out samples, as many as give this many answers, but no more than these
MOST_SITES = 256  # more take too long


def can_measure(sites: Sites) -> bool:
    """Whether sites are few enough to be tried one by one; experts, which share one width, are not."""
    routed = any(isinstance(site, MLPSite) and site.experts for site in sites)
    return not routed and sum(not isinstance(site, AttentionSite) for site in sites) <= MOST_SITES


def samples_alone(sites: Sites, tokens: Mapping[str, int]) -> int:
    """About how many samples each site is tried on, from the tokens of one; none if sites are not tried one by one."""
    if not can_measure(sites):
        return 0
    answers = max(tokens.values()) if sites.output else 1
    return min(SAMPLES, math.ceil(ANSWERS / answers))


def measure_sensitivities(trials: Trials, share: float) -> Mapping[str, float]:
    """Divergence from the dense model per unit of predicted error, at every site that loses this share alone."""
    allocator = trials.allocator
    dense = {site.name: site.width for site in allocator.sites}
    found: dict[str, float] = {}
    with allocator.observer.stage("sensitivities", len(allocator.curves), "sites") as advance:
        few = replace(trials, reference=trials.reference.few(ANSWERS, SAMPLES), advance=advance)
        for name, curve in allocator.curves.items():
            keep = min(kept_width(dense[name], share), dense[name] - 1)
            error = float(curve.errors[keep])
            if 0 < error < math.inf:
                alone = Allocation({**dense, name: keep}, {}, allocator.paths)
                found[name] = few.compare(alone).divergence().value / error
    return found
