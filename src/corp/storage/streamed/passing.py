"""Runs a model up to one block: earlier blocks return their hidden state, and the code around is the model's own.

So every block is called as the model calls it, with the masks and positions of the batch, but without other blocks'
weights. refit.blocks has verified that these arguments do not depend on hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating
from corp.calibration.hooks import removing, without_fast_path
from corp.calibration.threads import here
from corp.sites import Site
from corp.surgery.refit.replay import Call, Enough, Run, record, refusal, stream_of
from corp.surgery.refit.shortcuts import taking


class Manner(NamedTuple):
    """How a block is called and what it returns: the hidden state's argument, and the output's class and length."""

    at: int | str
    kind: type | None = None  # None: the hidden state itself
    length: int = 1

    def passed(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state of such a call, as the block would return it."""
        hidden = Call(args, kwargs, self.at).hidden
        return hidden if self.kind is None else self.kind([hidden, *[None] * (self.length - 1)])


Manners: TypeAlias = Mapping[str, Manner]


def manners_of(model: nn.Module, sites: Sequence[Site], names: Sequence[str], run: Run) -> dict[str, Manner]:
    """The manner of every block, observed in one pass; refuses outputs with more than hidden states."""
    answers: dict[str, Any] = {}

    def watch(name: str) -> Any:
        hook = here(lambda _m, _a, output: answers.__setitem__(name, output))
        return model.get_submodule(name).register_forward_hook(hook)

    with removing([watch(name) for name in names]):
        calls = record(model, sites, run).calls
    return {name: _manner(name, calls[name], answers[name]) for name in names}


def _manner(name: str, call: Call, answer: Any) -> Manner:
    if isinstance(answer, Tensor):
        return Manner(call.at)
    if type(answer) not in (tuple, list) or any(part is not None for part in answer[1:]):
        raise refusal(f"{name} returns more than a hidden state")
    return Manner(call.at, type(answer), len(answer))


def passing(model: nn.Module, manners: Manners) -> AbstractContextManager[None]:
    """Make these blocks return their hidden state unchanged within this context; their hooks are called as usual."""
    return taking(model, {name: manner.passed for name, manner in manners.items()})


def through(model: nn.Module, name: str, manners: Manners, run: Run, hidden: Tensor | None = None) -> Tensor:
    """The output of the block `name` for `hidden`, or for the model's own hidden state, when the model is run.

    Enough is raised after the block; `run` must catch it.
    """
    seen: list[Tensor] = []
    at = manners[name].at

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None if hidden is None else Call(args, kwargs, at).having(hidden)[:2]

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        seen.append(stream_of(output))
        raise Enough

    module = model.get_submodule(name)
    handles = [module.register_forward_pre_hook(here(before), with_kwargs=True, prepend=True)]
    handles.append(module.register_forward_hook(here(after)))
    others = {other: manner for other, manner in manners.items() if other != name}
    with torch.no_grad(), evaluating(model), without_fast_path(), removing(handles), passing(model, others):
        run()
    return seen[0]


@contextmanager
def up_to(model: nn.Module, name: str, manners: Manners) -> Iterator[None]:
    """Within this context, the model runs only up to the block `name`, which returns its hidden state unchanged."""

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        raise Enough

    handle = model.get_submodule(name).register_forward_hook(here(after))
    with removing([handle]), passing(model, manners):
        yield
