"""Streaming first and second moments of a linear layer's input."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from corp.errors import StatisticsError
from corp.numerics.linalg import pack, unpack_upper

ACTIVE_EPS = 1e-2  # |x| above this counts as active (the paper gives no number for its "active probability")
BLOCK = 256  # columns per block of the upper triangle: narrower products cost more time than they save
CHUNK = 4096  # tokens multiplied at a time: limits the centred copy
PIECE = 512  # on a CPU, tokens centred and summed at a time: temporary copies are small and stay in cache
CHANNELS = ("total_seen", "square_seen", "total", "active")  # sums with one number per channel


class Moments:
    """Sums over tokens about a fixed shift, y = x - shift.

    Over all tokens: their number, sum y, sum y^2 (cheap; they rank channels and give the bias). Over all or a sample of
    them, as many as the fit needs: n, sum y, sum y y^T and how often |x| > eps. And for the residual stream that the
    layer's output is added to: sum log ||r||^2 and the number of tokens.
    Products are float32 (float64 for float64 models), sums float64. The shift is the first batch's mean
    unless one is set: without it rounding of a large mean would hide a small variance.
    """

    def __init__(self, width: int, outer: Tensor | None = None) -> None:
        self.width = width
        self.seen = 0
        self.n = 0
        self.shift: Tensor | None = None  # (D,)
        self.total_seen = torch.zeros(width, dtype=torch.float64)  # (D,)
        self.square_seen = torch.zeros(width, dtype=torch.float64)  # (D,)
        self.total = torch.zeros(width, dtype=torch.float64)  # (D,)
        # (D, D), upper triangle by blocks
        self.outer = torch.zeros(width, width, dtype=torch.float64) if outer is None else outer
        self.active = torch.zeros(width, dtype=torch.float64)  # (D,)
        self.stream = torch.zeros(2, dtype=torch.float64)

    def see_stream(self, r: Tensor) -> None:
        """Add tokens r (N, o) of the stream that the layer adds to."""
        norms = torch.linalg.vector_norm(r if r.dtype == torch.float64 else r.float(), dim=-1).double()
        logs = 2 * norms.clamp(min=torch.finfo(torch.float32).tiny).log().sum()
        self.stream += torch.stack([logs, logs.new_tensor(float(len(r)))]).to(self.stream)

    @property
    def stream_energy(self) -> float | None:
        """The geometric mean of ||r||^2 of that stream; None if it was not observed.

        In language models the first token of a text may have more energy than all others together, which would make
        the arithmetic mean meaningless.
        """
        logs, tokens = self.stream.tolist()
        return math.exp(logs / tokens) if tokens else None

    def update(self, x: Tensor, sample: Tensor | None = None) -> None:
        """Add the tokens x (N, D); if `sample` (n, D) is given, add products of these tokens only."""
        if len(x) == 0:
            return
        x = x if x.dtype == torch.float64 else x.float()
        if self.shift is None:
            self.shift = shift_of(x)
        if self.total.device != sum_device(x):
            self.to(sum_device(x))
        shift = self.shift.to(x)
        total, square = self._add_products(x if sample is None else sample.to(x.dtype), shift)
        if sample is not None:
            total, square = _sums(x, shift)
        self.total_seen += total
        self.square_seen += square
        self.seen += len(x)

    def _add_products(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Add y y^T of these tokens; returns their sum y and sum y^2, which are computed on the way."""
        product: list[Tensor] = []
        total = torch.zeros_like(self.total)
        for part in x.split(CHUNK):
            y = torch.empty_like(part)  # (c, D)
            for some, centred in zip(*(of.split(_piece(x)) for of in (part, y)), strict=True):
                total += torch.sub(some, shift, out=centred).sum(0).to(total)
                self.active += some.abs().gt_(ACTIVE_EPS).sum(0).to(self.active)  # in place: no mask, no cast
            add_products(product, y)
        for start, block in zip(range(0, self.width, BLOCK), product, strict=True):
            self.outer[start : start + BLOCK, start:] += block.to(self.outer.device)
        self.n += len(x)
        self.total += total
        return total, torch.cat([block.diagonal() for block in product]).to(total)

    def empty(self) -> Moments:
        return Moments(self.width)

    def to(self, device: torch.device) -> None:
        for name in ("outer", *CHANNELS):
            setattr(self, name, getattr(self, name).to(device))
        self.shift = None if self.shift is None else self.shift.to(device)

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.total_seen).all() and torch.isfinite(self.square_seen).all())

    @property
    def mean(self) -> Tensor:
        """E[x] (D,), over all tokens."""
        return self._shift() + self.total_seen / self.seen

    @property
    def energy(self) -> Tensor:
        """E[x^2] (D,), over all tokens."""
        self._shift()
        delta = self.total_seen / self.seen
        spread = self.square_seen / self.seen - delta.square()
        return spread.clamp(min=0) + self.mean.square()

    def cov(self) -> Tensor:
        """E[(x - mu)(x - mu)^T] (D, D)."""
        delta = self.total / self._count()
        return mirrored((self.outer / self.n).addr_(delta, delta, alpha=-1))

    @property
    def variance(self) -> Tensor:
        """The diagonal of cov() (D,)."""
        delta = self.total / self._count()
        return self.outer.diagonal() / self.n - delta.square()

    @property
    def active_share(self) -> Tensor:
        """P(|x| > eps) (D,)."""
        return self.active / self._count()

    def __add__(self, other: Moments) -> Moments:
        if self.width != other.width:
            raise StatisticsError(f"moments of {self.width} and of {other.width} channels cannot be added")
        if self.n == 0 or other.n == 0:
            return other if self.n == 0 else self
        shift = self._shift()
        rebased = other._rebased(shift)
        both = Moments(self.width, self.outer + rebased.outer)
        both.shift = shift
        for name in ("n", "seen", "stream", *CHANNELS):
            setattr(both, name, getattr(self, name) + getattr(rebased, name))
        return both

    def state(self) -> dict[str, Tensor]:
        """The whole state as tensors, for a file."""
        shift = torch.zeros(0, dtype=torch.float64) if self.shift is None else self.shift
        state = {"counts": torch.tensor([self.n, self.seen]), "shift": shift, "outer": pack(self.outer)}
        return {**state, "stream": self.stream, **{name: getattr(self, name) for name in CHANNELS}}

    @classmethod
    def from_state(cls, width: int, state: dict[str, Tensor]) -> Moments:
        moments = cls(width, unpack_upper(state["outer"], width))
        moments.n, moments.seen = (int(count) for count in state["counts"])
        moments.shift = state["shift"] if len(state["shift"]) else None
        moments.stream = state["stream"]
        for name in CHANNELS:
            setattr(moments, name, state[name])
        return moments

    @staticmethod
    def shapes(width: int) -> dict[str, tuple[int, ...]]:
        """The shapes of `state` once tokens were added; checked before an untrusted file is read."""
        whole = {"counts": (2,), "stream": (2,), "outer": (width * (width + 1) // 2,)}
        return {**whole, **dict.fromkeys(("shift", *CHANNELS), (width,))}

    def _rebased(self, shift: Tensor) -> Moments:
        """These sums about another shift: y' = y + e with e = old shift - new shift."""
        e = self._shift() - shift
        if not bool(e.any()):
            return self
        moved = copy.copy(self)
        moved.shift = shift
        moved.total_seen = self.total_seen + self.seen * e
        moved.square_seen = self.square_seen + 2 * e * self.total_seen + self.seen * e.square()
        moved.total = self.total + self.n * e
        cross = torch.outer(self.total, e)
        moved.outer = self.outer + cross + cross.mT + self.n * torch.outer(e, e)
        return moved

    def _count(self) -> int:
        self._shift()
        return self.n

    def _shift(self) -> Tensor:
        if self.shift is None or self.n == 0:
            raise StatisticsError("no tokens were seen at this site")
        return self.shift


def shift_of(x: Tensor) -> Tensor:
    """The per-channel mean of one batch of tokens (n, D), on the device of the sums."""
    return x.float().mean(0).to(sum_device(x), torch.float64) if x.dtype != torch.float64 else x.mean(0)


def _sums(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """sum y and sum y^2 (D,) of all tokens, in pieces that stay in cache."""
    total, square = (torch.zeros(x.shape[1], dtype=torch.float64, device=sum_device(x)) for _ in range(2))
    centred = x.new_empty(min(len(x), _piece(x)), x.shape[1])
    for part in x.split(_piece(x)):
        y = torch.sub(part, shift, out=centred[: len(part)])
        total += y.sum(0).to(total)
        square += y.square_().sum(0).to(square)
    return total, square


def _piece(x: Tensor) -> int:
    """How many tokens to centre at a time; a GPU takes all, because every step has to be launched."""
    return PIECE if x.device.type == "cpu" else CHUNK


def add_products(into: list[Tensor], y: Tensor) -> None:
    """Row blocks of the upper triangle of y^T y, added to `into` (made on the first call): half the full product."""
    starts = range(0, y.shape[1], BLOCK)
    if not into:
        into += [y[:, start : start + BLOCK].mT @ y[:, start:] for start in starts]
        return
    for start, block in zip(starts, into, strict=True):
        block.addmm_(y[:, start : start + BLOCK].mT, y[:, start:])


def mirrored(upper: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle is known in row blocks, in place."""
    for start in range(0, len(upper), BLOCK):
        stop = min(start + BLOCK, len(upper))
        own = upper[start:stop, start:stop].triu()
        upper[start:stop, start:stop] = own + own.triu(1).mT
        upper[stop:, start:stop] = upper[start:stop, stop:].mT
    return upper


def sum_device(x: Tensor) -> torch.device:
    """The device of float64 sums: that of the data, except for MPS, which has no float64."""
    return torch.device("cpu") if x.device.type == "mps" else x.device
