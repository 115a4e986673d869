"""Models larger than the device: accelerate keeps weights on the host or on disk and moves them when needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from corp.errors import ModelError

PLACES = ("cpu", "disk")


@contextmanager
def offloaded(model: nn.Module, place: str, device: torch.device) -> Iterator[None]:
    """Within this context, `model` computes on `device` with its weights at `place`; afterwards it is unchanged."""
    try:
        from accelerate import cpu_offload, disk_offload
        from accelerate.hooks import remove_hook_from_submodules
    except ModuleNotFoundError as error:
        raise ModelError("offloading needs accelerate: pip install 'corp-prune[offload]'") from error
    with tempfile.TemporaryDirectory(prefix="corp-offload-") as folder:
        try:
            if place == "cpu":
                cpu_offload(model, execution_device=device)
            else:
                disk_offload(model, folder, execution_device=device)
            yield
        finally:
            remove_hook_from_submodules(model)  # brings the weights back
