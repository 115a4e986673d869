"""Classifiers: accuracy where there are labels, agreement with the dense model and KL from it where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from corp.errors import DataError, ModelError
from corp.evaluate.run import Contender, side_by_side
from corp.measure.intervals import Interval, Mean, paired_difference, wilson


@dataclass
class Score:
    """Sums over samples; the properties are means, None where there was nothing to take them over."""

    samples: int = 0
    agreeing: int = 0
    divergence: Mean = field(default_factory=Mean)
    labelled: int = 0
    first: int = 0
    five: int = 0
    paired: int = 0
    gained: int = 0  # right where the dense model is wrong
    lost: int = 0  # wrong where the dense model is right

    @property
    def agreement(self) -> float | None:
        """Share of samples on which the most likely class is the dense model's."""
        return self.agreeing / self.divergence.n if self.divergence.n else None

    @property
    def kl(self) -> float | None:
        """Mean KL divergence of the model's class distribution from the dense model's, in nats."""
        return self.divergence.total / self.divergence.n if self.divergence.n else None

    @property
    def top1(self) -> float | None:
        return self.first / self.labelled if self.labelled else None

    @property
    def top5(self) -> float | None:
        return self.five / self.labelled if self.labelled else None

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """One batch of logits (B, K), the dense model's, and class indices (B,)."""
        # Sums in float64 on the host: not every device has it, and logits are small.
        logits = _logits(output)
        dense = None if reference is None else _logits(reference)
        self.samples += len(logits)
        if dense is not None:
            self._compare(logits, dense)
        if target is not None:
            self._judge(logits, dense, target.cpu())

    def _compare(self, logits: Tensor, dense: Tensor) -> None:
        if logits.shape != dense.shape:
            raise ModelError(
                f"the model tells {logits.shape[1]} classes apart, the dense model {dense.shape[1]}: "
                "they cannot be compared; evaluate them apart"
            )
        log_p, log_q = dense.log_softmax(1), logits.log_softmax(1)
        self.divergence.add((log_p.exp() * (log_p - log_q)).sum(1))
        self.agreeing += int((logits.argmax(1) == dense.argmax(1)).sum())

    def _judge(self, logits: Tensor, dense: Tensor | None, labels: Tensor) -> None:
        if int(labels.max()) >= logits.shape[1] or int(labels.min()) < 0:
            odd = int(labels.max()) if int(labels.max()) >= logits.shape[1] else int(labels.min())
            raise DataError(f"label {odd} is not one of the model's {logits.shape[1]} classes (0 is the first)")
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # (B, 5)
        right = hits[:, 0]
        self.labelled += len(labels)
        self.first += int(right.sum())
        self.five += int(hits.any(1).sum())
        if dense is not None:
            before = dense.topk(1, dim=1).indices[:, 0] == labels
            self.paired += len(labels)
            self.gained += int((right & ~before).sum())
            self.lost += int((before & ~right).sum())

    def intervals(self) -> dict[str, Interval | None]:
        """Every number with its 95 % interval; None for what could not be measured."""
        compared, labelled = self.divergence.n, self.labelled
        return {
            "top1": wilson(self.first, labelled) if labelled else None,
            "top5": wilson(self.five, labelled) if labelled else None,
            "top1_difference": paired_difference(self.gained, self.lost, self.paired) if self.paired else None,
            "agreement": wilson(self.agreeing, compared) if compared else None,
            "kl": self.divergence.interval() if compared else None,
        }


def _logits(output: Any) -> Tensor:
    output = getattr(output, "logits", output)  # transformers gives a record
    if not isinstance(output, Tensor) or output.dim() != 2:
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ModelError(f"a classifier's output is logits of shape (images, classes); this model gives {got}")
    logits = output.detach().cpu().double()  # (B, K)
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(f"the model gives values that are not finite in {output.dtype}; try dtype=float32")
    return logits


def compare(
    dense: nn.Module,
    models: Sequence[nn.Module],
    batches: Iterable[Any],
    progress: Callable[[int], None] | None = None,
) -> list[Score]:
    """Score every model against the dense one, in one pass; a batch is images, or (images, labels)."""
    scores = [Score() for _ in models]
    side_by_side(dense, [Contender(m, s) for m, s in zip(models, scores, strict=True)], batches, progress)
    return scores
