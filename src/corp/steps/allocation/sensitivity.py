"""How sensitive the output is to an error at each site, measured: models in which one site alone is narrower.

Rules based on the energy of the residual stream are wrong by a factor of up to ten in small language models, where
the first and the last layers matter most. A few held-out samples are enough, because the distance of the output from
the dense one is measured, not the difference of two distances.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from corp.calibration.hooks import block_of
from corp.recipe import kept_width
from corp.sites import MLPSite, Site, Sites, ValueSite
from corp.steps.allocation.allocator import Allocation
from corp.steps.allocation.known import KnownBlocks
from corp.steps.allocation.trials import Trials, sketch_model

# As many held-out samples as have this many answers, but at most 96. On DeiT-Tiny 128 give the same model, but with
# 32 the rates lead to widths whose model is 7 % farther from the dense one.
ANSWERS, SAMPLES = 1024, 96
LEAST, MOST = 8, 16  # half of a chain's layers are tried, but at least 8 and at most 16: neighbours are much alike


def can_measure(sites: Sites) -> bool:
    """Whether sites can be tried one by one; experts, which share one width, cannot."""
    return not any(isinstance(site, MLPSite) and site.experts for site in sites)


def tried_alone(sites: Sequence[Site]) -> list[str]:
    """The sites that are tried: all of a short chain, evenly spaced ones of a longer chain, with both ends.

    Values of a block with an MLP are tried only at the ends of their chain. In between, an error of either moves the
    output equally: the rates differ by less than a third in SmolLM2, but by a factor of 90 in its first block.
    """
    beside = set(_beside_mlps(sites))
    chains = _chains(site.name for site in sites)
    return [chain[i] for chain in chains for i in _spaced(len(chain), ends_only=beside.issuperset(chain))]


def samples_alone(sites: Sites, tokens: Mapping[str, int]) -> int:
    """About how many samples each site is tried on, given the tokens per sample; 0 if sites are not tried alone."""
    if not can_measure(sites):
        return 0
    answers = max(tokens.values()) if sites.output else 1
    return min(SAMPLES, math.ceil(ANSWERS / answers))


class Sensitivities(NamedTuple):
    """Divergence from the dense model per unit of predicted error of every site, and what that was measured on."""

    rates: Mapping[str, float]
    answers: int

    @property
    def precise(self) -> bool:
        """Whether the rates can be used alone; those of fewer answers follow the samples too much."""
        return self.answers >= ANSWERS


def measure_sensitivities(trials: Trials, share: float) -> Sensitivities:
    """How far the output moves if a site loses this share alone."""
    allocator = trials.allocator
    dense = {site.name: site.width for site in allocator.sites}
    found: dict[str, float] = {}
    sites = [allocator.sites[name] for name in allocator.curves()]
    tried = tried_alone(sites)
    with allocator.observer.stage("sensitivities", len(tried), "sites") as advance:
        few = trials.reference.few(ANSWERS, SAMPLES)
        known = KnownBlocks.of(allocator.model, allocator.sites, few)
        for name in tried:
            keep = min(kept_width(dense[name], share), dense[name] - 1)
            error = float(allocator.curves()[name].errors[keep])
            if 0 < error < math.inf:
                alone = Allocation({**dense, name: keep}, {}, allocator.paths())
                trial = known.skip(sketch_model(allocator, trials.recipe, alone), allocator.sites[name])
                found[name] = few.compare(trial).divergence().value / error
            advance(1)
    return Sensitivities(filled(sites, found), few.answers)


def filled(sites: Sequence[Site], found: Mapping[str, float]) -> dict[str, float]:
    """The rates of all sites: measured, that of the MLP in the same block, or interpolated geometrically."""
    chains = _chains(site.name for site in sites)
    rates = {name: rate for chain in chains for name, rate in _interpolated(chain, found).items()} | dict(found)
    shared = {name: rates[mlp] for name, mlp in _beside_mlps(sites).items() if mlp in rates and name not in found}
    return rates | shared


def _beside_mlps(sites: Sequence[Site]) -> dict[str, str]:
    """The values that are in one block with an MLP, each with that MLP."""
    mlps = {block_of(site.down): site.name for site in sites if isinstance(site, MLPSite)}
    values = {site.name: mlps.get(block_of(site.down)) for site in sites if isinstance(site, ValueSite)}
    return {name: mlp for name, mlp in values.items() if mlp is not None}


def _chains(names: Iterable[str]) -> list[list[str]]:
    """Sites whose names differ in numbers only, in order: one kind of site in all layers of a tower."""
    chains: dict[str, list[str]] = {}
    for name in names:
        chains.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return list(chains.values())


def _spaced(n: int, *, ends_only: bool) -> list[int]:
    most = 2 if ends_only else min(MOST, max(LEAST, -(-n // 2)))
    return list(range(n)) if n <= most else [round(i * (n - 1) / (most - 1)) for i in range(most)]


def _interpolated(chain: list[str], found: Mapping[str, float]) -> dict[str, float]:
    known = [i for i, name in enumerate(chain) if found.get(name, 0.0) > 0]
    if not known:
        return {}
    logs = np.interp(range(len(chain)), known, [math.log(found[chain[i]]) for i in known])
    return {name: math.exp(log) for name, log in zip(chain, logs, strict=True)}
