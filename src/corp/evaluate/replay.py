"""Recorded inputs of some of a model's modules, replayed to the modules that replace them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from corp.calibration.hooks import removing
from corp.calibration.threads import here
from corp.sites import MLPSite, Site


class Inputs:
    """The inputs of the modules called `names` in one forward pass, call by call.

    Otherwise a layer that a model calls several times (ALBERT's) would see the output of its own narrowed version.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.calls: dict[str, list[Any]] = {name: [] for name in names}

    @classmethod
    def of(cls, site: Site) -> Inputs:
        """The inputs of the layers that make an MLP's channels, or of the whole attention."""
        if isinstance(site, MLPSite):
            return cls(list(dict.fromkeys(rows.module for rows in site.up)))
        return cls([site.attention])

    def recorded(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this context, one forward pass of the model is recorded."""

        def hook(name: str) -> Any:
            return lambda _module, args, kwargs: self.calls[name].append(_copied((args, kwargs), {}))

        return self._before(model, hook)

    def replayed(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within this context, the modules get the recorded tensors in one forward pass."""

        def hook(name: str) -> Any:
            left = iter(self.calls[name])
            return lambda _module, args, kwargs: _exchanged((args, kwargs), next(left, None))

        return self._before(model, hook)

    def _before(self, model: nn.Module, hook: Any) -> AbstractContextManager[None]:
        modules = {name: model.get_submodule(name) for name in self.calls}
        return removing(
            [m.register_forward_pre_hook(here(hook(name)), with_kwargs=True) for name, m in modules.items()]
        )


def _copied(value: Any, made: dict[int, Tensor]) -> Any:
    """Copies of the tensors of real numbers in a module's arguments; everything else is None.

    Each tensor has one copy, in `made`, so that queries that are also keys are so in the replay.
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return None
        return made.setdefault(id(value), value.detach().clone())
    if isinstance(value, tuple | list):
        return tuple(_copied(one, made) for one in value)
    return {key: _copied(one, made) for key, one in value.items()} if type(value) is dict else None


def _exchanged(value: Any, known: Any) -> Any:
    """The value, with every tensor replaced by the recorded one if that has its shape."""
    if isinstance(value, Tensor):
        return known if isinstance(known, Tensor) and known.shape == value.shape else value
    if isinstance(value, tuple | list) and isinstance(known, tuple) and len(value) == len(known):
        return type(value)(map(_exchanged, value, known)) if type(value) in (tuple, list) else value
    if type(value) is dict and isinstance(known, dict):
        return {key: _exchanged(one, known.get(key)) for key, one in value.items()}
    return value
