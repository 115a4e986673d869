"""Classifiers side by side over the same batches: agreement with the dense model, KL from it, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from corp.batches import move, size_of


@dataclass
class Score:
    """Sums over samples; the properties are means. `top1` and `top5` are None without labels."""

    samples: int = 0
    agreeing: int = 0
    divergence: float = 0.0
    labelled: int = 0
    first: int = 0
    five: int = 0

    @property
    def agreement(self) -> float:
        """Share of samples on which the most likely class is the dense model's."""
        return self.agreeing / max(1, self.samples)

    @property
    def kl(self) -> float:
        """Mean KL divergence of the model's class distribution from the dense model's, in nats."""
        return self.divergence / max(1, self.samples)

    @property
    def top1(self) -> float | None:
        return self.first / self.labelled if self.labelled else None

    @property
    def top5(self) -> float | None:
        return self.five / self.labelled if self.labelled else None

    def add(self, logits: Tensor, dense: Tensor, labels: Tensor | None) -> None:
        """One batch of logits (B, C), the dense model's, and labels (B,)."""
        log_p, log_q = dense.double().log_softmax(1), logits.double().log_softmax(1)
        self.samples += len(logits)
        self.agreeing += int((logits.argmax(1) == dense.argmax(1)).sum())
        self.divergence += float((log_p.exp() * (log_p - log_q)).sum())
        if labels is not None:
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices
            hits = best == labels.to(best.device)[:, None]
            self.labelled += len(labels)
            self.first += int(hits[:, 0].sum())
            self.five += int(hits.any(1).sum())


def compare(
    dense: nn.Module,
    models: Sequence[nn.Module],
    batches: Iterable[Tensor],
    labels: Tensor | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score every model against the dense one, in one pass over the data; labels (N,) go with the samples in order."""
    scores = [Score() for _ in models]
    first = next(dense.parameters())
    start = 0
    with torch.no_grad():
        for batch in batches:
            x = move(batch, first.device, first.dtype)
            stop = start + size_of(batch)
            reference = dense(x)
            for model, score in zip(models, scores, strict=True):
                score.add(model(x), reference, None if labels is None else labels[start:stop])
            start = stop
            if progress:
                progress(size_of(batch))
    return scores
