"""A device and a dtype to test in."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Place(NamedTuple):
    """A device, a dtype, and the relative error that a result in that dtype may have."""

    device: torch.device
    dtype: torch.dtype
    tolerance: float

    def put(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.device, self.dtype) if x.is_floating_point() else x.to(self.device)
