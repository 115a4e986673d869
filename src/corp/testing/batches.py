"""Batches that a model does not take are told from models that break a promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from corp.adapters.proof import tensors
from corp.calibration.batches import Forward, evaluating, feed
from corp.errors import DataError, ModelError


def require_runs(model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> None:
    """Refuse batches that the model does not take, before anything is said about the model."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if not batches:
        raise DataError("check_model needs at least one batch; the list is empty")
    for number, batch in enumerate(batches):
        try:
            with torch.no_grad(), evaluating(model):
                made = list(tensors(feed(model, batch, forward)))
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"the model does not run on batch {number} ({described(batch)}): {type(error).__name__}: {error}. "
                "A tensor becomes model(x), a dict model(**x); for anything else pass forward=lambda model, batch: ..."
            ) from error
        if not made:
            raise DataError(f"the model returns no tensor of real numbers for batch {number} ({described(batch)})")


def described(batch: Any) -> str:
    """A batch by its shapes."""
    if isinstance(batch, Tensor):
        return f"a {batch.dtype} tensor {tuple(batch.shape)}".replace("torch.", "")
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(f"{name}: {described(value)}" for name, value in batch.items())
    if isinstance(batch, tuple | list) and batch:
        return f"a {type(batch).__name__} that begins with {described(batch[0])}"
    return f"a {type(batch).__name__}"
