"""Classifiers: accuracy if there are labels, agreement with the dense model and KL from it if there is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from corp.errors import DataError, ModelError
from corp.measure.closeness import compare_logits, logits_of, require_finite
from corp.measure.intervals import Interval, Mean, paired_difference, wilson


@dataclass
class Score:
    """Sums over samples."""

    agreeing: int = 0
    divergence: Mean = field(default_factory=Mean)
    labelled: int = 0
    first: int = 0
    five: int = 0
    gained: int = 0  # right where the dense model is wrong
    lost: int = 0  # wrong where the dense model is right

    def add(self, output: Any, reference: Any = None, target: Tensor | None = None) -> None:
        """Add one batch of logits (B, K), the dense model's, and class indices (B,)."""
        # Sums in float64 on the host: not every device has it, and logits are small.
        logits = _logits(output)
        dense = None if reference is None else _logits(reference)
        if dense is not None:
            self._compare(logits, dense)
        if target is not None:
            self._judge(logits, dense, target.cpu())

    def _compare(self, logits: Tensor, dense: Tensor) -> None:
        if logits.shape != dense.shape:
            raise ModelError(
                f"the model has {logits.shape[1]} classes and the dense model {dense.shape[1]}, so they cannot be "
                f"compared; evaluate them separately"
            )
        same, apart = compare_logits(logits, dense)
        self.divergence.add(apart)
        self.agreeing += int(same.sum())

    def _judge(self, logits: Tensor, dense: Tensor | None, labels: Tensor) -> None:
        if int(labels.max()) >= logits.shape[1] or int(labels.min()) < 0:
            odd = next(label for label in labels.tolist() if not 0 <= label < logits.shape[1])
            raise DataError(f"label {odd} is not one of the model's {logits.shape[1]} classes (0 is the first)")
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]  # (B, 5)
        right = hits[:, 0]
        self.labelled += len(labels)
        self.first += int(right.sum())
        self.five += int(hits.any(1).sum())
        if dense is not None:
            before = dense.topk(1, dim=1).indices[:, 0] == labels
            self.gained += int((right & ~before).sum())
            self.lost += int((before & ~right).sum())

    def intervals(self) -> dict[str, Interval | None]:
        """Every number with its 95 % interval; None for what could not be measured."""
        compared, labelled = self.divergence.n, self.labelled
        return {
            "top1": wilson(self.first, labelled) if labelled else None,
            "top5": wilson(self.five, labelled) if labelled else None,
            "top1_difference": paired_difference(self.gained, self.lost, labelled) if labelled and compared else None,
            "agreement": wilson(self.agreeing, compared) if compared else None,
            "kl": self.divergence.interval() if compared else None,
        }


def _logits(output: Any) -> Tensor:
    logits = logits_of(output, "images", "classes")
    require_finite(logits, logits.dtype)
    return logits.cpu().double()
