"""The settings of calibration: how many tokens, how much memory, which devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from corp.calibration.offload import PLACES
from corp.calibration.pairs import SAMPLED_QUERIES
from corp.errors import StatisticsError
from corp.sites import AttentionSite, OutputHead, Site

# The tokens that tokens="auto" collects for every MLP, if there are that many; see docs/calibration.md.
ENOUGH_TOKENS, ENOUGH_PER_CHANNEL = 30_000, 40
# Likewise the queries of all samples whose attention is computed for rotary heads.
ENOUGH_QUERIES = 2560


@dataclass(frozen=True)
class Settings:
    """How to calibrate.

    tokens               "auto" (enough for a stable fit), "all", or a number per sample
    memory               bytes for the sums; None: the free memory, with a margin
    checkpoint_seconds   between checkpoints of a run with an output folder
    fresh                start over instead of continuing a killed run
    offload, device      keep the weights on "cpu" or "disk" while layers compute on this device
    causal               leave out logits that a causal mask hides (in blocks); False counts all, as in the paper
    """

    tokens: str | int = "auto"
    memory: int | None = None
    checkpoint_seconds: float = 120.0
    fresh: bool = False
    offload: str | None = None
    device: str = "cpu"
    causal: bool = True

    def __post_init__(self) -> None:
        if self.tokens not in ("auto", "all") and (not isinstance(self.tokens, int) or self.tokens < 1):
            raise StatisticsError(f"tokens={self.tokens!r} is not 'auto', 'all' or a number of tokens per sample")
        if self.offload not in (None, *PLACES):
            raise StatisticsError(f"offload={self.offload!r} is not one of {', '.join(PLACES)}")

    def tokens_of(self, width: int, samples: int | None) -> int:
        """The number of tokens per sample for a fit of `width` channels; 0 means all."""
        if isinstance(self.tokens, int):
            return self.tokens
        return 0 if self.tokens == "all" else enough_tokens(width, samples)

    def queries_of(self, dims: int, samples: int | None) -> int:
        """The most queries per sample whose attention is computed, for heads with `dims` rotated dimensions."""
        if self.tokens != "auto" or not samples:
            return SAMPLED_QUERIES
        return min(SAMPLED_QUERIES, math.ceil(max(ENOUGH_QUERIES, ENOUGH_PER_CHANNEL * dims) / samples))

    def per_sample(self, sites: Iterable[Site | OutputHead], samples: int | None) -> dict[str, int]:
        """How many tokens of a sample each site uses, or queries if it is a rotary attention."""
        return {
            site.name: self.queries_of(site.rotary_dims, samples)
            if isinstance(site, AttentionSite)
            else self.tokens_of(site.inputs, samples)
            for site in sites
        }


def enough_tokens(width: int, samples: int | None) -> int:
    """How many tokens of each of `samples` samples give a stable fit of `width` channels; 0 means all."""
    return math.ceil(max(ENOUGH_TOKENS, ENOUGH_PER_CHANNEL * width) / samples) if samples else 0
