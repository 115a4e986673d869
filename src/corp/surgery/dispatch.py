"""Models whose weights are not all here, or that accelerate spreads over devices.

accelerate's hooks replace `forward`, so they are removed during surgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from corp.errors import ModelError


def dispatched(model: nn.Module) -> dict[str, Any]:
    """The hooks of accelerate, by the name of their module."""
    return {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


def require_present(model: nn.Module) -> None:
    """Refuse a model whose weights accelerate keeps elsewhere until they are needed."""
    for name, hook in dispatched(model).items():
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise ModelError(
                f"{name or 'the model'} is offloaded: accelerate loads its weights when it runs, so they cannot be "
                "narrowed; use a device_map whose devices hold all weights (max_memory=...), or the CPU"
            )


def require_weights(model: nn.Module) -> None:
    """Refuse a model on the meta device, whose parameters are shapes without numbers."""
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise ModelError(
            f"{empty[0]} is on the meta device, and so are {len(empty) - 1} more parameters: they have no values. Load "
            "the weights first (load_state_dict(..., assign=True) or from_pretrained)"
        )


@contextmanager
def undispatched(model: nn.Module) -> Iterator[None]:
    """Remove accelerate's hooks from `model` within this context; afterwards the new modules have them."""
    hooks = dispatched(model)
    if hooks:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        for name in hooks:
            module = remove_hook_from_module(model.get_submodule(name))
            if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                del module.forward  # left behind by accelerate; a module of another class would still use it
    yield
    for name, hook in hooks.items():
        add_hook_to_module(model.get_submodule(name), hook)
