"""Sentence encoders: mean-pooled embeddings compared with the dense model's, and with human judgement (STS)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import atanh, sqrt, tanh
from typing import Any

import torch
from torch import Tensor

from corp.errors import DataError, ModelError
from corp.measure.closeness import pooled, require_finite
from corp.measure.intervals import Interval, Mean, Z


@dataclass
class Embeddings:
    """Cosines of sentence embeddings to the dense model's; with `keep`, the embeddings themselves, in order."""

    keep: bool = False
    cosine: Mean = field(default_factory=Mean)
    kept: list[Tensor] = field(default_factory=list)

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """Add hidden states (B, T, C) of the model and of the dense one; target is the attention mask (B, T)."""
        if target is None:
            raise DataError("sentence embeddings take batches of (inputs, attention mask)")
        embedded = pool(output, target)  # (B, C)
        if self.keep:
            self.kept.append(embedded)
        if reference is not None:
            dense = pool(reference, target)
            if dense.shape != embedded.shape:
                raise ModelError(
                    f"embeddings of width {embedded.shape[1]} and {dense.shape[1]} (dense) cannot be compared"
                )
            self.cosine.add(torch.cosine_similarity(embedded, dense, dim=1))

    def intervals(self) -> dict[str, Interval | None]:
        return {"cosine": self.cosine.interval() if self.cosine.n else None}


def pool(output: Any, mask: Tensor) -> Tensor:
    """The mean of the last hidden states over real tokens, in float64 on the host."""
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None and getattr(output, "hidden_states", None):
        hidden = output.hidden_states[-1]
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        raise ModelError(
            "this model gives no hidden states of shape (texts, tokens, width) to make sentence embeddings from"
        )
    require_finite(hidden, hidden.dtype)
    return pooled(hidden.detach(), mask)


def sts_spearman(embeddings: Tensor, scores: Tensor) -> Interval:
    """Rank correlation of human scores (N,) with the cosines of N pairs: rows 0, 2, 4 … with rows 1, 3, 5 …"""
    cosines = torch.cosine_similarity(embeddings[0::2], embeddings[1::2], dim=1)
    return spearman(cosines, scores)


def spearman(a: Tensor, b: Tensor) -> Interval:
    """Spearman's rho with mean ranks for ties; the interval uses Fisher's z and Bonett and Wright's variance (2000)."""
    if len(a) != len(b) or len(a) < 4:
        raise DataError(f"a rank correlation takes at least four pairs of values, not {len(a)} and {len(b)}")
    x, y = ranks(a), ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = float((x @ x * (y @ y)).sqrt())
    if norm == 0:
        raise DataError("a rank correlation of values that are all equal is not defined")
    rho = min(1.0, max(-1.0, float(x @ y) / norm))
    if abs(rho) == 1:
        return Interval(rho, rho, rho)
    half = Z * sqrt((1 + rho**2 / 2) / (len(a) - 3))
    return Interval(rho, tanh(atanh(rho) - half), tanh(atanh(rho) + half))


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1; equal values share their mean rank."""
    _, which, counts = values.double().unique(sorted=True, return_inverse=True, return_counts=True)
    last: Tensor = counts.cumsum(0).double()
    means: Tensor = last - (counts.double() - 1) / 2
    return means[which]
