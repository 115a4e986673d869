"""Other threads may use a model meanwhile: hooks act in one thread, and the last one to leave restores settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

from torch import nn

_lock = RLock()
_inside: dict[Hashable, tuple[int, Callable[[], None]]] = {}  # how many are inside, and what puts the setting back


class Here:
    """A hook for calls of the thread that made it; those of others pass it by."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.thread = hook, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs) if get_ident() == self.thread else None


def here(hook: Callable[..., Any]) -> Here:
    """The hook, for calls of this thread alone."""
    return Here(hook)


def has_hooks(module: nn.Module) -> bool:
    """Whether anything but another thread's pruning watches the module, and may change what it computes."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not isinstance(hook, Here) or hook.thread == get_ident() for hook in hooks)


@contextmanager
def shared(changes: Mapping[Hashable, Callable[[], Callable[[], None]]]) -> Iterator[None]:
    """Inside, settings are changed: the first to come calls a change, the last to leave what that returned."""
    with _lock:
        for key, change in changes.items():
            count, back = _inside[key] if key in _inside else (0, change())
            _inside[key] = count + 1, back
    try:
        yield
    finally:
        with _lock:
            for key in changes:
                count, back = _inside.pop(key)
                if count > 1:
                    _inside[key] = count - 1, back
                else:
                    back()
