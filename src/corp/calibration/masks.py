"""Which tokens of the current batch are real, read from the calls of modules that get a mask."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from corp.calibration.threads import here
from corp.errors import StatisticsError
from corp.sites import AttentionSite, Mask, OutputHead, Site


class Masks:
    """The masks of the current calls, by module and argument; an argument that is not a mask is an error."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Tensor | StatisticsError | None] = {}

    def of(self, where: Mask | None) -> Tensor | None:
        """The mask (B, n), True at real tokens; None if all are real."""
        if where is None:
            return None
        seen = [self._seen.get((module, where.argument)) for module in (where.module, *where.around)]
        usable = [mask for mask in seen if not isinstance(mask, StatisticsError)]
        if not usable and isinstance(seen[0], StatisticsError):
            raise seen[0]
        return usable[0]

    def watch(self, model: nn.Module, sites: Iterable[Site | OutputHead]) -> list[RemovableHandle]:
        """Hooks that record the masks of every call; wrappers and generators make no difference."""
        wanted: dict[str, dict[str, bool]] = {}
        for site in sites:
            for where in (site.q_mask, site.k_mask) if isinstance(site, AttentionSite) else (site.mask,):
                if where is not None:
                    for module in (where.module, *where.around):
                        wanted.setdefault(module, {})[where.argument] = where.marks_padding
        self._seen.clear()
        return [self._watch_module(model, name, arguments) for name, arguments in wanted.items()]

    def _watch_module(self, model: nn.Module, name: str, arguments: dict[str, bool]) -> RemovableHandle:
        module = model.get_submodule(name)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = bound(module, args, kwargs)
            for argument, marks_padding in arguments.items():
                try:
                    found = real(call.get(argument), None, marks_padding=marks_padding, what=argument)
                    self._seen[name, argument] = found
                except StatisticsError as error:
                    self._seen[name, argument] = error

        return module.register_forward_pre_hook(here(before), with_kwargs=True)


def bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward call by name; by the class's signature, because offloading wraps the instance."""
    call = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs)
    extra = [p.name for p in call.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    return {**call.arguments, **{k: v for name in extra for k, v in call.arguments.get(name, {}).items()}}


def real(given: Any, shape: Sequence[int] | None, *, marks_padding: bool, what: str) -> Tensor | None:
    """A mask as models take it -> (B, n), True at real tokens; None if there is none or all tokens are real."""
    if given is None:
        return None
    mask = given[None] if isinstance(given, Tensor) and given.dim() == 1 and shape is not None else given
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise StatisticsError(
            f"{what} must be a (batch, tokens) mask that tells real tokens from padding; got {got}. "
            "Pass the tokenizer's own mask, not one that the model derives from it"
        )
    if marks_padding:  # torch.nn turns True into -inf on the way to its layers
        tokens = ~mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    elif not bool(mask.any()) or (mask.is_floating_point() and bool((mask < 0).any())):
        # Either added to logits, and 0 at real tokens (Longformer), or marks padding, and there is none (DETR).
        tokens = mask >= 0
    else:
        tokens = mask != 0
    return None if bool(tokens.all()) else tokens
