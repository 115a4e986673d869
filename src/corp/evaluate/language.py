"""Causal language models: perplexity, and next-token agreement with the dense model and KL from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from corp.data.text import IGNORED as IGNORED
from corp.errors import DataError, ModelError
from corp.measure.closeness import CHUNK, compare_logits, logits_of, require_finite
from corp.measure.intervals import Interval, Mean

AXES = ("texts", "tokens", "vocabulary")


@dataclass
class NextTokens:
    """Sums over the scored positions; every number is a mean over those, per sequence."""

    nll: Mean = field(default_factory=Mean)
    more: Mean = field(default_factory=Mean)  # NLL beyond the dense model's
    agreeing: Mean = field(default_factory=Mean)
    divergence: Mean = field(default_factory=Mean)

    @property
    def perplexity(self) -> float:
        """exp(total NLL / total tokens)."""
        return exp(self.nll.mean)

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """Add logits (B, T, V) of the model and of the dense one; target (B, T) are the next tokens."""
        logits = logits_of(output, *AXES)
        dense = None if reference is None else logits_of(reference, *AXES)
        if target is None:
            raise DataError("perplexity takes batches of (inputs, next tokens)")
        if dense is not None and dense.shape != logits.shape:
            raise ModelError(
                f"the model has a vocabulary of {logits.shape[-1]} tokens and the dense model {dense.shape[-1]}, so "
                f"they cannot be compared; evaluate them separately"
            )
        target = target.to(logits.device)
        rows, columns = (target != IGNORED).nonzero(as_tuple=True)  # of every scored position (N,)
        counts = rows.bincount(minlength=len(target))  # (B,)
        own = dense is None or dense is logits
        values = _values(logits, None if own else dense, target, rows, columns)
        sums = values.new_zeros(len(values), len(target)).index_add_(1, rows.cpu(), values)  # (4, B)
        self.nll.add(sums[0], counts)
        if dense is not None:
            for total, part in zip((self.more, self.agreeing, self.divergence), sums[1:], strict=True):
                total.add(part, counts)

    def intervals(self) -> dict[str, Interval | None]:
        """Every number with its 95 % interval over sequences; None for what could not be measured."""
        if not self.nll.tokens:
            raise DataError("no token was scored: every sequence has fewer than two tokens")
        compared = self.agreeing.tokens > 0
        return {
            "perplexity": self.nll.interval().map(exp),
            "perplexity_ratio": self.more.interval().map(exp) if compared else None,
            "agreement": self.agreeing.interval().map(lambda end: min(1.0, max(0.0, end))) if compared else None,
            "kl": self.divergence.interval() if compared else None,
        }


def _values(logits: Tensor, dense: Tensor | None, target: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Per scored position (4, N) on the host: NLL, NLL beyond the dense model's, agreement, KL from the dense model.

    Without a dense model the last three are those of a model against itself: 0, 1 and 0.
    """
    step = max(1, CHUNK // logits.shape[-1])
    parts = [torch.zeros(4, 0, dtype=torch.float64)]
    for at in zip(rows.split(step), columns.split(step), strict=True):
        q, nll = _nll(logits[at], target[at])
        if dense is None:
            parts.append(torch.stack([nll, nll * 0, nll * 0 + 1, nll * 0]))
        else:
            p, before = _nll(dense[at], target[at])
            parts.append(torch.stack([nll, nll - before, *compare_logits(q, p)]))
    found = torch.cat(parts, 1)
    require_finite(found, logits.dtype)
    return found


def _nll(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, V) in float32 at least, and the NLL of their targets (n,) in float64 on the host."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide, cross_entropy(wide, target, reduction="none").cpu().double()
