"""Thread safety: hooks act only in their own thread, and the last thread to finish restores settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

from torch import nn

_lock = RLock()
_inside: dict[Hashable, tuple[int, Callable[[], None]]] = {}  # how many are open, and what restores the setting


class Here:
    """A hook for calls of the thread that made it; it ignores calls of others."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.thread = hook, get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs) if get_ident() == self.thread else None


def here(hook: Callable[..., Any]) -> Here:
    """The hook, limited to calls of this thread."""
    return Here(hook)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks, other than those of another thread's pruning, that may change its output."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not isinstance(hook, Here) or hook.thread == get_ident() for hook in hooks)


@contextmanager
def shared(changes: Mapping[Hashable, Callable[[], Callable[[], None]]]) -> Iterator[None]:
    """Change settings within this context: the first thread to enter applies a change, the last to leave undoes it."""
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
