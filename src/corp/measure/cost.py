"""Parameters and multiply-accumulates of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from corp.calibration.batches import Forward, run
from corp.calibration.hooks import uncompiled, without_fast_path
from corp.errors import ModelError, first_line
from corp.surgery.attention import true_widths


def count_params(model: nn.Module) -> int:
    """The number of parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, batch: Any, forward: Forward | None = None) -> int:
    """Multiply-accumulates of one forward pass over `batch`.

    torch's counter assigns zero to its fused CPU attention kernel and nn.TransformerEncoderLayer's fast path, so
    attention is counted unfused, and with its true widths: the model does not need zero-padding for faster kernels.
    """
    counter = FlopCounterMode(display=False)
    try:
        unfused = sdpa_kernel(SDPBackend.MATH)
        with torch.no_grad(), _frozen(model), uncompiled(), without_fast_path(), unfused, true_widths(), counter:
            run(model, batch, forward)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:  # from the model's own code
        name, reason = type(model).__name__, first_line(error)
        raise ModelError(f"operations cannot be counted, because {name} does not run on its input: {reason}") from error
    return int(counter.get_total_flops()) // 2


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Turn off gradients of parameters: the counter's module tracker fails on parameters that are used directly."""
    wanting = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)
