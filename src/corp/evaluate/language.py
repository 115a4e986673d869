"""Causal language models: perplexity, and next-token agreement with the dense model and KL from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import Any

import torch
from torch import Tensor

from corp.errors import DataError, ModelError
from corp.measure.intervals import Interval, PerToken

IGNORED = -100  # a target that is not scored
CHUNK = 1 << 24  # logits compared at a time: copies of all logits of a batch would not fit for a large vocabulary


@dataclass
class NextTokens:
    """Sums over the positions whose next token is judged; every number is a mean over those, per sequence."""

    nll: PerToken = field(default_factory=PerToken)
    more: PerToken = field(default_factory=PerToken)  # NLL beyond the dense model's
    agreeing: PerToken = field(default_factory=PerToken)
    divergence: PerToken = field(default_factory=PerToken)

    @property
    def perplexity(self) -> float:
        """exp(total NLL / total tokens)."""
        return exp(self.nll.mean)

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """Logits (B, T, V) of the model and of the dense one; target (B, T), the next tokens."""
        logits = _logits(output)
        dense = None if reference is None else _logits(reference)
        if target is None:
            raise DataError("perplexity takes batches of (inputs, next tokens)")
        if dense is not None and dense.shape != logits.shape:
            raise ModelError(
                f"the model has a vocabulary of {logits.shape[-1]} tokens, the dense model {dense.shape[-1]}: "
                "they cannot be compared; evaluate them apart"
            )
        target = target.to(logits.device)
        rows, columns = (target != IGNORED).nonzero(as_tuple=True)  # of every judged position (N,)
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
            raise DataError("no token was judged: every sequence is shorter than two tokens")
        compared = self.agreeing.tokens > 0
        return {
            "perplexity": _exp(self.nll.interval()),
            "perplexity_ratio": _exp(self.more.interval()) if compared else None,
            "agreement": _share(self.agreeing.interval()) if compared else None,
            "kl": self.divergence.interval() if compared else None,
        }


def _values(logits: Tensor, dense: Tensor | None, target: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Per judged position (4, N) on the host: NLL, NLL beyond the dense model's, agreement, KL from the dense model.

    Without another model these are what a model has against itself: 0, 1 and 0.
    """
    step = max(1, CHUNK // logits.shape[-1])
    parts = []
    for start in range(0, len(rows), step):
        at = rows[start : start + step], columns[start : start + step]
        wanted = target[at][:, None]  # (n, 1)
        log_q = _log_softmax(logits[at])  # (n, V)
        nll = -log_q.gather(1, wanted)[:, 0]
        if dense is None:
            same = torch.zeros_like(nll)
            parts.append(torch.stack([nll, same, same + 1, same]).cpu().double())
            continue
        log_p = _log_softmax(dense[at])
        before = -log_p.gather(1, wanted)[:, 0]
        agrees = (log_q.argmax(1) == log_p.argmax(1)).to(nll.dtype)
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        parts.append(torch.stack([nll, nll - before, agrees, kl]).cpu().double())
    found = torch.cat(parts, 1) if parts else torch.zeros(4, 0, dtype=torch.float64)
    if not bool(torch.isfinite(found).all()):
        raise ModelError(f"the model gives values that are not finite in {logits.dtype}; try dtype=float32")
    return found


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(
            f"a language model's output is logits of shape (texts, tokens, vocabulary); this one gives {got}"
        )
    return logits.detach()


def _exp(interval: Interval) -> Interval:
    return Interval(*(None if end is None else exp(end) for end in interval))  # type: ignore[arg-type]


def _share(interval: Interval) -> Interval:
    value, low, high = interval
    return Interval(value, low if low is None else max(0.0, low), high if high is None else min(1.0, high))
