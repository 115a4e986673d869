"""Shortcuts through a block: an attention that was corrected runs its last layer only, on the input it had before.

Within the refit of a block, an attention's input is always the same, and only its last layer changes. So later passes
through the block need not compute queries, keys and values again; the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.hooks import input_of, removing
from corp.calibration.threads import here
from corp.sites import LinearSite, ValueSite
from corp.surgery.refit.replay import Enough, is_multihead, stream_of
from corp.surgery.stand_in import stand_in

Shortcuts: TypeAlias = dict[str, Callable[..., Any]]  # by the name of the attention: what is called in its place


@contextmanager
def taking(model: nn.Module, shortcuts: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within this context, these modules of the model do not run; what gives their outputs is called instead."""
    whole = {name: model.get_submodule(name) for name in shortcuts}
    try:
        for name, call in shortcuts.items():
            model.set_submodule(name, stand_in(whole[name], call))
        yield
    finally:
        for name, module in whole.items():
            model.set_submodule(name, module)


@contextmanager
def finding(model: nn.Module, site: LinearSite, *, stop: bool = False) -> Iterator[Shortcuts]:
    """Within this context, find the shortcut of the site's attention. With `stop`, the block ends behind it.

    If the attention returns anything but the output of its last layer, such as its probabilities, it has none, and
    neither have other sites.
    """
    found: Shortcuts = {}
    if not has_shortcut(site):
        yield found
        return
    assert isinstance(site, ValueSite)
    layer, last = model.get_submodule(site.down), list[tuple[Tensor, Tensor]]()

    def after_layer(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        last[:] = [(input_of(args, kwargs).clone(), output)]

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if not last:  # the layer was not called
            return
        x, y = last[0]
        alone = isinstance(output, Tensor)
        rest = () if alone else tuple(output[1:])
        if torch.equal(stream_of(output), y) and not any(isinstance(part, Tensor) for part in rest):
            found[site.attention] = lambda *_args, **_kwargs: layer(x) if alone else (layer(x), *rest)
        if stop:
            raise Enough

    handles = [
        layer.register_forward_hook(here(after_layer), with_kwargs=True),
        model.get_submodule(site.attention).register_forward_hook(here(after)),
    ]
    with removing(handles):
        yield found


def has_shortcut(site: LinearSite) -> bool:
    """Whether the site is an attention whose last layer is a module inside it."""
    return isinstance(site, ValueSite) and not is_multihead(site) and site.down.startswith(f"{site.attention}.")
