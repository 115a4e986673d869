"""A warning about fits with too little data, which follow the sample and not the distribution."""

from __future__ import annotations

import math
from typing import Any

from corp.calibration.statistics import Statistics
from corp.errors import warn
from corp.planning.site_plan import SitePlan
from corp.sites import and_others

OVERFIT = 0.2  # error on unseen data may exceed the error on fitted data by this much before a warning


def warn_if_weak(sites: list[SitePlan], stats: Statistics) -> None:
    """Warn of sites whose fit has too little data, and estimate how much more would be enough."""
    few = [site for site in sites if 0 < _tokens(site, stats) < 2 * _fitted_on(site)]
    if few:
        site = few[0]
        what = {"mlp": "channels", "attn": "dimensions per head", "vo": "value dimensions"}[site.kind]
        warn(
            f"{and_others(few)}: {_tokens(site, stats)} tokens for {_fitted_on(site)} kept {what}; "
            f"a stable fit needs at least {2 * _fitted_on(site)}. Calibrate on more samples"
        )
    weak = sorted((site for site in sites if site.overfit > OVERFIT and site not in few), key=lambda s: -s.overfit)
    if weak:
        enough = math.ceil(stats.samples * weak[0].overfit / OVERFIT)
        warn(
            f"{and_others(weak)}: the error is {weak[0].overfit:.0%} larger on data that was not fitted; "
            f"about {enough} samples (now {stats.samples}) would bring that to {OVERFIT:.0%}"
        )


def _fitted_on(site: SitePlan) -> int:
    """How many inputs the fit has: queries and keys are fitted per head, values of all heads together."""
    return site.keep * len(site.kept) if site.kind == "vo" else site.keep


def _tokens(site: SitePlan, stats: Statistics) -> int:
    """The number of tokens in a full fit of this site; 0 if there was no fit."""
    if all(cost.J_uncomp == cost.J for cost in site.costs):
        return 0
    if site.kind != "attn":
        sums = stats.moments_of(site.name)
        return sums.fit.n + sums.held.n
    attention: Any = stats.sums[site.name]
    return int(attention.fit.tokens + attention.held.tokens)
