"""How close a pruned model is to the dense one, without labels and for any kind of output.

Logits (a record's `logits`, or one row per sample) give answers: closeness is how often the answer is the same (the
class, the next token), and the KL divergence of the distributions. Any other output, hidden states or features, is
pooled over tokens; closeness is then the mean cosine, and the squared error relative to the dense output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corp.calibration.batches import (
    PLACES,
    Forward,
    evaluating,
    feed,
    first_samples,
    inputs_of,
    size_of,
    takes_places,
)
from corp.errors import DataError, ModelError
from corp.measure.intervals import Interval, Mean, wilson

CHUNK = 1 << 21  # logits compared at a time, so that the copies fit in the cache
KEPT = 1 << 27  # logits of the dense model that are kept: half a gigabyte in float32
LEAST = 16  # positions compared per sequence, however many sequences there are


class Closeness:
    """Sums over samples. `agreement` is what users want to know; `divergence` shows finer differences."""

    def __init__(self) -> None:
        self.same, self.apart = Mean(), Mean()  # of answers: one per sample, or one per token
        self.cosine, self.error = Mean(), Mean()  # of features
        self.single = True  # whether there is one answer per sample
        self.each: list[Tensor] = []  # the divergence of every sample (B,), batch by batch

    def add(self, output: Tensor, dense: Tensor, mask: Tensor | None, *, answers: bool) -> None:
        """Add outputs (B, K), (B, n, K), or (B, K, …) for answers in maps; mask (B, n) is true at real tokens."""
        if output.shape != dense.shape:
            raise ModelError(f"outputs of shape {tuple(output.shape)} and {tuple(dense.shape)} cannot be compared")
        if not answers:
            x, y = (pooled(part, mask) for part in (output, dense))  # (B, C)
            self.cosine.add(torch.cosine_similarity(x, y, dim=1))
            norm = y.square().sum(1).clamp(min=torch.finfo(torch.float64).tiny)
            self.each.append((x - y).square().sum(1) / norm)
            self.error.add(self.each[-1])
            return
        q, p = (_flat(part) for part in (output, dense))  # (B, n, K)
        real = torch.ones(q.shape[:2], dtype=torch.bool) if mask is None or mask.shape != q.shape[:2] else mask.bool()
        self.single = self.single and q.shape[1] == 1
        rows = real.nonzero()[:, 0].cpu()
        chosen = real.to(q.device)
        same, apart = compare_logits(q[chosen], p[chosen])
        tokens = real.sum(1).cpu()
        same, apart = (torch.zeros(len(q), dtype=torch.float64).index_add_(0, rows, part) for part in (same, apart))
        self.same.add(same, tokens)
        self.apart.add(apart, tokens)
        self.each.append(apart / tokens.clamp(min=1))

    def agreement(self) -> Interval:
        """The share of equal answers, or the mean cosine, with its 95 % interval."""
        if self.cosine.n:
            return self.cosine.interval().map(lambda end: min(1.0, max(-1.0, end)))
        if not self.same.tokens:
            raise DataError("nothing was compared: the held-out batches are empty")
        if self.single:
            return wilson(round(self.same.total), self.same.tokens)
        return self.same.interval().map(lambda end: min(1.0, max(0.0, end)))

    def divergence(self, rival: Closeness | None = None) -> Interval:
        """KL from the dense distribution in nats, or the relative squared error.

        If the comparison ended early, it is the rival's divergence on all samples plus the difference on the samples
        that both saw, because the other samples may be easier.
        """
        own = self.error.interval() if self.error.n else self.apart.interval()
        if rival is None or len(self.each) == len(rival.each):
            return own
        value = rival.divergence().value + float(self._behind(rival).mean())
        return own.map(lambda end: end + value - own.value)

    def lags(self, rival: Closeness) -> bool:
        """Whether it is farther from the dense model than the rival by two standard errors, on the same samples."""
        behind = self._behind(rival)
        return len(behind) > 1 and bool(behind.mean() > 2 * behind.std() / len(behind) ** 0.5)

    def _behind(self, rival: Closeness) -> Tensor:
        """How much larger each sample's divergence is than with the rival."""
        return torch.cat([own - other for own, other in zip(self.each, rival.each, strict=False)])

    @property
    def what(self) -> str:
        if self.cosine.n:
            return "mean cosine to the dense output"
        return "same class as the dense model" if self.single else "same next token as the dense model"


class Reader(NamedTuple):
    """Reads what is compared in a model's outputs."""

    features: bool  # whether the model has no classifier, so that its outputs are not answers
    samples: int  # about how many there are in total: of fewer, more positions are compared

    @classmethod
    def of(cls, dense: nn.Module, samples: int) -> Reader:
        return cls(getattr(dense, "num_classes", None) == 0, samples)  # 0 is timm's way of saying so

    def read(self, batch: Any, output: Any) -> Output:
        """What is compared; outputs that cannot be compared are refused."""
        values, answers = tensor_of(output)
        require_finite(values, values.dtype)
        values, mask, answers = values.detach(), mask_of(batch), answers and not self.features
        if answers and values.shape[-1 if values.dim() < 4 else 1] == 1:
            raise ModelError(
                "the model gives one number per sample, so there are no answers to agree on; give a target"
            )
        if not answers or values.dim() != 3:
            return Output(values, mask, answers)
        every = self._stride(values)
        if every == 1:
            return Output(values, mask, answers)
        places = torch.arange(0, values.shape[1], every, device=values.device)
        return Output(values[:, places], None if mask is None else mask[:, ::every], answers, places)

    def read_if_possible(self, batch: Any, output: Any) -> Output | None:
        """What is compared; None if that cannot be read."""
        try:
            return self.read(batch, output)
        except ModelError:
            return None

    def _stride(self, logits: Tensor) -> int:
        """The step between compared positions of sequences (B, n, K), so that the logits of all samples can be kept."""
        most = max(LEAST, KEPT // max(1, self.samples * logits.shape[-1]))
        return max(1, -(-logits.shape[1] // most))


class Reference:
    """The dense model's outputs on some batches, with which other models are compared.

    `known` are outputs that `reader` has read before, one per batch or None.
    """

    def __init__(
        self,
        dense: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None = None,
        *,
        reader: Reader | None = None,
        known: Sequence[Output | None] = (),
    ) -> None:
        self.batches, self.forward = list(batches), forward
        self.reader = reader or Reader.of(dense, sum(map(size_of, batches)))
        both = zip_longest(self.batches, known)
        self.outputs = [self._output(dense, batch) if output is None else output for batch, output in both]

    def compare(self, model: nn.Module, rival: Closeness | None = None) -> Closeness:
        """How close the model is; ends early if the model is clearly worse than the rival, the best one so far."""
        found = Closeness()
        for batch, dense in zip(self.batches, self.outputs, strict=True):
            found.add(self._output(model, batch, dense).values, dense.values, dense.mask, answers=dense.answers)
            if rival is not None and found.lags(rival):
                break
        return found

    @property
    def answers(self) -> int:
        """How many answers are compared, or samples of features."""
        return sum(size_of(batch) * dense.each for batch, dense in zip(self.batches, self.outputs, strict=True))

    def few(self, answers: int, samples: int) -> Reference:
        """Return a reference to the first samples only: as many as give this many answers, at most `samples`."""
        part = copy(self)  # it compares the same positions
        part.batches, part.outputs, taken = [], [], 0
        for batch, dense in zip(self.batches, self.outputs, strict=True):
            wanted = min(samples, math.ceil(answers / dense.each)) - taken
            if wanted <= 0:
                break
            some = batch if self.forward is not None else first_samples(batch, wanted)
            taken += size_of(some)
            part.batches.append(some)
            part.outputs.append(dense.first(size_of(some)))
        return part

    def run(self, model: nn.Module, batch: Any) -> Any:
        """The model's output on one of the batches."""
        with torch.no_grad(), evaluating(model):
            return feed(model, batch, self.forward)

    def _output(self, model: nn.Module, batch: Any, dense: Output | None = None) -> Output:
        """What is compared; a model that can compute single logits computes only those that the dense one's have."""
        if dense is None or dense.places is None or self.forward is not None or not takes_places(model, batch):
            return self.reader.read(batch, self.run(model, batch))
        output = self.run(model, {**inputs_of(batch), PLACES: dense.places})
        values, _ = tensor_of(output)
        if values.shape != dense.values.shape:  # it took the argument and gave all of them
            return self.reader.read(batch, output)
        require_finite(values, values.dtype)
        return dense._replace(values=values.detach())


@dataclass
class Race:
    """Models compared one after the other, each only until it is clearly worse than the best one so far."""

    reference: Reference
    best: Closeness | None = None

    def divergence(self, model: nn.Module) -> Interval:
        found = self.reference.compare(model, self.best)
        divergence = found.divergence(self.best)
        if self.best is None or divergence.value < self.best.divergence().value:
            self.best = found
        return divergence


class Output(NamedTuple):
    """What is compared for one batch: answers (logits) or features, and which of their tokens are real."""

    values: Tensor
    mask: Tensor | None
    answers: bool
    places: Tensor | None = None  # of the tokens with these answers; None if all have one

    @property
    def each(self) -> int:
        """Answers per sample: one for every token, or for every place of a map (B, C, height, width)."""
        if self.values.dim() >= 4:
            return math.prod(self.values.shape[2:])
        return self.values.shape[1] if self.answers and self.values.dim() == 3 else 1

    def first(self, samples: int) -> Output:
        return self._replace(values=self.values[:samples], mask=None if self.mask is None else self.mask[:samples])


def tensor_of(output: Any) -> tuple[Tensor, bool]:
    """The tensor to compare in a model's output, and whether it is logits: a record's, or one row per sample."""
    fields = output if isinstance(output, Mapping) else vars(output) if hasattr(output, "__dict__") else {}
    logits = fields.get("logits")
    if isinstance(logits, Tensor) and logits.dim() >= 2:
        return logits, True
    if isinstance(output, Tensor):
        return output, output.dim() == 2
    hidden = fields.get("last_hidden_state")
    parts = [hidden, *(fields.values() if fields else output if isinstance(output, tuple | list) else [])]
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point() and part.dim() >= 2:
            return part, False
    raise ModelError(
        f"the model gives {type(output).__name__}, in which there is no tensor (samples, …) to compare; "
        "pass forward=lambda model, batch: ... that returns one"
    )


def mask_of(batch: Any) -> Tensor | None:
    """Which tokens of a batch are real; None if it has no mask."""
    batch = inputs_of(batch)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def pooled(output: Tensor, mask: Tensor | None) -> Tensor:
    """(B, C) in float64 on the host: the mean over real tokens of (B, n, C), anything else as one row per sample."""
    wide = output.cpu().double()
    if wide.dim() != 3:
        return wide.flatten(1)
    known = mask is not None and mask.shape == wide.shape[:2]
    weight = mask.cpu().double()[:, :, None] if known and mask is not None else wide.new_ones(*wide.shape[:2], 1)
    return (wide * weight).sum(1) / weight.sum(1).clamp(min=1)


def _flat(logits: Tensor) -> Tensor:
    """(B, n, K): classes come last, except in maps (B, K, height, width)."""
    if logits.dim() >= 4:
        logits = logits.movedim(1, -1)
    return logits.reshape(len(logits), -1, logits.shape[-1])


def compare_logits(logits: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of (N, K), in float64 on the host: whether the argmax is the same, and the KL from dense in nats."""
    same, apart = [], []
    for q, p in zip(*(part.split(max(1, CHUNK // logits.shape[-1])) for part in (logits, dense)), strict=True):
        wide = torch.promote_types(q.dtype, torch.float32)
        log_q, log_p = q.to(wide).log_softmax(1), p.to(wide).log_softmax(1)
        same.append((log_q.argmax(1) == log_p.argmax(1)).cpu().double())
        apart.append((log_p.exp() * (log_p - log_q)).sum(1).cpu().double())
    return torch.cat(same), torch.cat(apart)


def logits_of(output: Any, *axes: str) -> Tensor:
    """The logits of a model's output, or the output itself; `axes` names the dimensions they must have."""
    logits = getattr(output, "logits", output)  # transformers gives a record
    if not isinstance(logits, Tensor) or logits.dim() != len(axes):
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"logits of shape ({', '.join(axes)}) can be judged; this model gives {got}")
    return logits.detach()


def require_finite(values: Tensor, dtype: torch.dtype) -> None:
    # A sum is many times as fast as testing every value, and finite only if all of them are.
    if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
        raise ModelError(f"the model gives values that are not finite in {dtype}; run it in float32")
