"""Replay of blocks: a forward pass of the whole model is recorded once, then any block can be run on another stream.

A block is a numbered module, called with a hidden state and further arguments (masks, positions). In a chain of blocks
the hidden state is the unchanged output of the block before; so a block can be called again as the model called it,
with another hidden state. A model may have several chains, such as an encoder and a decoder. blocks.py determines
whether a model has this structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating
from corp.calibration.hooks import block_of, input_of, removing, without_fast_path
from corp.calibration.masks import Masks
from corp.calibration.multihead import averages
from corp.calibration.threads import here
from corp.errors import PlanError
from corp.sites import AttentionSite, LinearSite, Mask, Site, ValueSite
from corp.surgery.padded import taken

CONSTANTS = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)

Run: TypeAlias = Callable[[], Any]  # one forward pass of the whole model


class Call(NamedTuple):
    """How a block was called, and which argument was the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int | str

    @property
    def hidden(self) -> Tensor:
        given: Tensor = self.args[self.at] if isinstance(self.at, int) else self.kwargs[self.at]
        return given

    def having(self, hidden: Tensor | None) -> Call:
        """This call with another hidden state, or with none, so that records do not keep all of them alive."""
        if isinstance(self.at, int):
            return self._replace(args=(*self.args[: self.at], hidden, *self.args[self.at + 1 :]))
        return self._replace(kwargs={**self.kwargs, self.at: hidden})


@dataclass
class Passage:
    """One batch's pass through the model: how every block was called, in order, and which tokens were real."""

    calls: dict[str, Call] = field(default_factory=dict)
    starts: dict[str, Tensor] = field(default_factory=dict)  # hidden states that no block made
    masks: dict[Mask, Tensor | None] = field(default_factory=dict)
    first: int = 0  # index of its first sample among all
    samples: int = 0
    last: Tensor | None = None  # the last block's output, while the model runs
    batch: Any = None  # kept if chains are fed by others, for the calls that the pruned model makes
    fed: dict[str, Call] = field(default_factory=dict)  # the pruned model's calls of such chains

    def pruned_call(self, name: str) -> Call:
        """How the pruned model calls a block."""
        return self.fed.get(name) or self.calls[name]


@dataclass(frozen=True)
class Block:
    """A numbered module, whose output is its input plus the outputs of its sites, in order, times `scales` (o,).

    In a post-norm block every site has a junction, a norm whose input is the site's output plus the block's input or
    the output of the junction before; the output of the last one is the block's.
    """

    name: str
    starts: bool  # whether it starts a chain
    sites: tuple[LinearSite, ...]
    scales: tuple[Tensor, ...]
    tokens: int  # rows of the stream per sample
    batch_first: bool
    read: int = 0  # how many leading ones of them the model's output is read from (readout.py)
    ends: bool = False  # whether it ends a chain
    junctions: tuple[str, ...] = ()  # modules of a post-norm block
    fed: bool = False  # whether it starts a chain that takes something from earlier ones, as a decoder does


def stream_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


class Enough(Exception):  # noqa: N818  (no error)
    """Everything needed has been observed, so the rest of the block need not run."""


def drive(model: nn.Module, name: str, call: Call, hidden: Tensor) -> Tensor:
    """The block's output for this hidden state and its recorded arguments; the hidden state if Enough was raised."""
    block, call = model.get_submodule(name), call.having(hidden.clone())  # a block may add to it in place
    with torch.no_grad(), evaluating(block), without_fast_path(), suppress(Enough):
        hidden = stream_of(block(*call.args, **call.kwargs))
    return hidden


def record(model: nn.Module, sites: Sequence[Site], run: Run) -> Passage:
    """Run the model once, and record the calls of the blocks around the sites, and which tokens are real."""
    masks = Masks()
    with removing(masks.watch(model, sites)):
        passage = record_calls(model, blocks_of(sites), run)
    passage.masks = {where: masks.of(where) for site in sites if (where := getattr(site, "mask", None))}
    return passage


def record_calls(
    model: nn.Module,
    names: Sequence[str],
    run: Run,
    change: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ends: dict[str, Tensor | None] | None = None,
) -> Passage:
    """Run the model once, and record the calls of these blocks.

    `change` alters the hidden states with which chains start, by the name of their first block; `ends` receives
    blocks' outputs.
    """
    passage, changes = Passage(), change or {}
    handles: list[Any] = []

    def watch(name: str) -> None:
        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = next(reversed(passage.calls), "")
            along = before.rpartition(".")[0] == name.rpartition(".")[0]  # not from an encoder to a decoder
            call = _call(name, args, kwargs, passage.last if along else None)
            if name in passage.calls:
                raise refusal(f"{name} runs more than once in a forward pass")
            passage.calls[name] = call.having(None)
            if call.hidden is passage.last:
                return None
            passage.starts[name] = call.hidden.clone()
            return call.having(changes[name](call.hidden))[:2] if name in changes else None

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            passage.last = stream_of(output)
            if ends is not None and name in ends:
                ends[name] = passage.last.clone()

        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(here(enter), with_kwargs=True))
        handles.append(module.register_forward_hook(here(leave)))

    for name in names:
        watch(name)
    with torch.no_grad(), evaluating(model), without_fast_path(), removing(handles):
        run()
    passage.last = None
    return passage


def blocks_of(sites: Sequence[Site]) -> list[str]:
    """The numbered modules around the sites' layers."""
    found = (block_of(inside(site)) for site in sites)
    return list(dict.fromkeys(name for name in found if name is not None))


def inside(site: Site) -> str:
    """A layer of the site, by which its block is found."""
    return f"{site.name}.q" if isinstance(site, AttentionSite) else site.down


def refusal(reason: str) -> PlanError:
    return PlanError(f"this model cannot be refitted: {reason}")


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], last: Tensor | None) -> Call:
    """The call with its hidden state: the output of the block before, otherwise the first tensor of real numbers."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for _, value in given:
        _require_constant(name, value)
    tensors = [(at, x) for at, x in given if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise refusal(f"{name} takes no hidden state")
    at = next((at for at, x in tensors if x is last), tensors[0][0])
    return Call(args, kwargs, at)


def _require_constant(name: str, value: Any) -> None:
    """Require that an argument is the same when the block is called again: caches are refused."""
    if isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            _require_constant(name, part)
    elif not isinstance(value, CONSTANTS):
        raise refusal(
            f"{name} takes a {type(value).__name__}, which every call may change; run the model without a cache"
        )


class Seen(NamedTuple):
    """The input of a site's layer (None if it was not requested), and its output."""

    x: Tensor | None
    y: Tensor


@contextmanager
def watching(
    model: nn.Module, sites: Sequence[LinearSite], inputs: str = "", *, stop: bool = False
) -> Iterator[dict[str, Seen]]:
    """Within this context, collect the outputs of sites in the order of the data, and the input of one of them.

    They are copies, because blocks may add to them in place. With `stop`, the block ends there.
    """
    seen: dict[str, Seen] = {}

    def watch(site: LinearSite) -> Iterator[Any]:
        wanted = site.name == inputs

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = None
            if wanted:
                x = averages(module, args, kwargs) if is_multihead(site) else taken(module, input_of(args, kwargs))
            seen[site.name] = Seen(x, stream_of(output).clone())
            if wanted and stop:
                raise Enough

        name = site.attention if isinstance(site, ValueSite) and is_multihead(site) else site.down
        yield model.get_submodule(name).register_forward_hook(here(after), with_kwargs=True)

    with removing([handle for site in sites for handle in watch(site)]):
        yield seen


@contextmanager
def meeting(model: nn.Module, junctions: Sequence[str], *, stop: bool = False) -> Iterator[dict[str, Tensor]]:
    """Within this context, collect the inputs of these modules; with `stop`, the block ends at the first."""
    met: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            met[name] = input_of(args, kwargs).clone()
            if stop:
                raise Enough

        return model.get_submodule(name).register_forward_pre_hook(here(before), with_kwargs=True)

    with removing([watch(name) for name in junctions]):
        yield met


def is_multihead(site: LinearSite) -> bool:
    """Whether the site is in an nn.MultiheadAttention, which uses its output projection without calling it."""
    return isinstance(site, ValueSite) and site.v.bare


def close(a: Tensor, b: Tensor, blocks: int = 1) -> bool:
    """Whether two tensors are equal up to the order in which kernels add, and the rounding of this many blocks."""
    eps = torch.finfo(a.dtype).eps
    tolerance = max(0.1 * eps**0.5, 2 * eps * (blocks - 1) ** 0.5)
    return a.shape == b.shape and bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(a))
