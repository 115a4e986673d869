"""Where fits are computed, and in which precision: float64 if the device is fast at it, otherwise refined float32."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Compute capabilities with float64 at a half or a third of the speed of float32; other GPUs have it at 1/32 or 1/64.
FAST_FLOAT64 = ((6, 0), (7, 0), (8, 0), (9, 0), (10, 0))
HOST = torch.device("cpu")


class Place(NamedTuple):
    """A device, and the dtype in which systems are solved on it."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Place:
        """The place on this device; on the CPU if the device cannot solve systems, or is the meta device."""
        place = cls(device, torch.float64 if _has_fast_float64(device) else torch.float32)
        return place if device.type != "meta" and place.solves() else cls(HOST, torch.float64)

    @classmethod
    def exactly(cls, device: torch.device) -> Place:
        """The place for sums and checks in float64: the device itself, fast or not, if it has float64."""
        return cls(HOST if device.type in ("mps", "meta") else device, torch.float64)

    def solves(self) -> bool:
        """Whether torch implements everything that fits need on this device."""
        try:
            A = torch.eye(2, device=self.device, dtype=self.dtype)
            torch.cholesky_solve(A, torch.linalg.cholesky_ex(A).L)
            torch.linalg.eigh(A), torch.linalg.qr(A), torch.linalg.svd(A)
        except (RuntimeError, NotImplementedError, AssertionError, TypeError):
            return False
        return True

    def __str__(self) -> str:
        return f"{self.device} in {str(self.dtype).removeprefix('torch.')}"


def _has_fast_float64(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) in FAST_FLOAT64
    return device.type == "cpu"


def in_float64(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """A layer's weight (o, D) and bias (o,), or zeros, in float64, on their own device if it has float64."""
    W = weight.to(*Place.exactly(weight.device))
    return W, W.new_zeros(len(W)) if bias is None else bias.to(W)
