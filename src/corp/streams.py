"""Blocks one by one: a forward pass of the whole model is recorded once, then any block can be run on another stream.

A block is a numbered module, called with a hidden state and what comes with it (masks, positions). In a chain of blocks
the hidden state is the output of the block before, itself and unchanged; so a block can be called again as the model
called it, with another hidden state in its place. `examine` finds out whether a model is made like that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.batches import evaluating
from corp.errors import PlanError
from corp.sites import AttentionSite, LinearSite, Mask, Site, ValueSite
from corp.stats.collect import block_of, removing, without_fast_path
from corp.stats.masks import Masks
from corp.stats.multihead import averages

NOISE = 0.1  # of its own size is added to a hidden state to see whether blocks are driven as the model drives them
ROUNDING = 8  # so many rounding errors of the stream may be left where a block is its input plus its sites' outputs
FLOOR = 1e-12  # rounding errors in float64 are smaller than those of measuring them
CONSTANTS = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)

Run: TypeAlias = Callable[[], Any]  # one forward pass of the whole model


class Call(NamedTuple):
    """How a block was called, and where in that the hidden state was."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int | str

    @property
    def hidden(self) -> Tensor:
        given: Tensor = self.args[self.at] if isinstance(self.at, int) else self.kwargs[self.at]
        return given

    def having(self, hidden: Tensor | None) -> Call:
        """The same call with another hidden state, or none: records must not keep every one alive."""
        if isinstance(self.at, int):
            return self._replace(args=(*self.args[: self.at], hidden, *self.args[self.at + 1 :]))
        return self._replace(kwargs={**self.kwargs, self.at: hidden})


@dataclass
class Passage:
    """One batch on its way through the model: how every block was called, in order, and which tokens were real."""

    calls: dict[str, Call] = field(default_factory=dict)
    starts: dict[str, Tensor] = field(default_factory=dict)  # hidden states that no block made
    masks: dict[Mask, Tensor | None] = field(default_factory=dict)
    first: int = 0  # index of its first sample among all
    samples: int = 0
    last: Tensor | None = None  # what the last block gave, while the model runs


@dataclass(frozen=True)
class Block:
    """A numbered module, whose output is its input plus, times `scales` (o,), the outputs of its sites, in order."""

    name: str
    starts: bool  # a chain
    sites: tuple[LinearSite, ...]
    scales: tuple[Tensor, ...]
    tokens: int  # rows of the stream per sample
    batch_first: bool
    read: int = 0  # so many of them, the first ones, the model's output is read from (reading.py)
    ends: bool = False  # a chain


def stream_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple | list) and output else output


def drive(model: nn.Module, name: str, call: Call, hidden: Tensor) -> Tensor:
    """The block's output, called as it was but with this hidden state."""
    block, call = model.get_submodule(name), call.having(hidden)
    with torch.no_grad(), evaluating(block), without_fast_path():
        output: Tensor = stream_of(block(*call.args, **call.kwargs))
    return output


def record(
    model: nn.Module,
    sites: Sequence[Site],
    run: Run,
    change: Callable[[Tensor], Tensor] | None = None,
    ends: dict[str, Tensor | None] | None = None,
) -> Passage:
    """Run the model once. `change` alters the hidden states that chains start with; `ends` takes blocks' outputs."""
    passage, masks = Passage(), Masks()
    handles = masks.watch(model, sites)

    def watch(name: str) -> None:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call = _call(name, args, kwargs, passage.last)
            if name in passage.calls:
                raise refusal(f"{name} runs more than once in a forward pass")
            passage.calls[name] = call.having(None)
            if call.hidden is passage.last:
                return None
            passage.starts[name] = call.hidden
            return None if change is None else call.having(change(call.hidden))[:2]

        def after(_module: nn.Module, _args: Any, output: Any) -> None:
            passage.last = stream_of(output)
            if ends is not None and name in ends:
                ends[name] = passage.last

        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after))

    for name in blocks_of(sites):
        watch(name)
    with torch.no_grad(), evaluating(model), without_fast_path(), removing(handles):
        run()
    passage.last = None
    passage.masks = {where: masks.of(where) for site in sites if (where := getattr(site, "mask", None))}
    return passage


def blocks_of(sites: Sequence[Site]) -> list[str]:
    """The numbered modules around the sites' layers."""
    found = (block_of(inside(site)) for site in sites)
    return list(dict.fromkeys(name for name in found if name is not None))


def inside(site: Site) -> str:
    """A layer of the site, by which its block is found."""
    return f"{site.name}.q" if isinstance(site, AttentionSite) else site.down


def refusal(reason: str) -> PlanError:
    return PlanError(f"this model cannot be fitted sequentially: {reason}. Leave out sequential=True (--sequential)")


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], last: Tensor | None) -> Call:
    """Where the hidden state is: what the last block gave, else the first tensor of real numbers."""
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for _, value in given:
        _require_constant(name, value)
    tensors = [(at, x) for at, x in given if isinstance(x, Tensor) and x.is_floating_point()]
    if not tensors:
        raise refusal(f"{name} takes no hidden state")
    at = next((at for at, x in tensors if x is last), tensors[0][0])
    return Call(args, kwargs, at)


def _require_constant(name: str, value: Any) -> None:
    """What is passed along must be the same when the block is called again: no caches."""
    if isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            _require_constant(name, part)
    elif not isinstance(value, CONSTANTS):
        raise refusal(f"{name} is given a {type(value).__name__}, which may change with every call (no caches, please)")


class Seen(NamedTuple):
    """What went into a site's layer (None where nobody asked), and what came out."""

    x: Tensor | None
    y: Tensor


@contextmanager
def watching(model: nn.Module, sites: Sequence[LinearSite], inputs: str = "") -> Iterator[dict[str, Seen]]:
    """While open, what sites of `model` give, in the order in which they do, and the input of the one called so."""
    seen: dict[str, Seen] = {}

    def watch(site: LinearSite) -> Iterator[Any]:
        wanted = site.name == inputs

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = None
            if wanted:
                x = averages(module, args, kwargs) if is_multihead(site) else args[0]
            seen[site.name] = Seen(x, stream_of(output))

        name = site.attention if isinstance(site, ValueSite) and is_multihead(site) else site.down
        yield model.get_submodule(name).register_forward_hook(after, with_kwargs=True)

    with removing([handle for site in sites for handle in watch(site)]):
        yield seen


def is_multihead(site: LinearSite) -> bool:
    """nn.MultiheadAttention uses its output projection without calling it."""
    return isinstance(site, ValueSite) and site.v.bare


def examine(model: nn.Module, sites: Sequence[Site], run: Run) -> list[Block]:
    """The model's blocks in the order of the data, if they can be run one by one; says why where they cannot.

    The whole model is run again with other hidden states at the start of every chain: blocks that are driven from those
    must end where it does. What hides between blocks, or comes to them another way, shows by that.
    """
    passage = record(model, sites, run)
    order = list(passage.calls)
    if not order:
        raise refusal("it has no numbered blocks that the data passes")
    final = [name for name, after in zip(order, [*order[1:], None], strict=True) if after in (None, *passage.starts)]
    ends: dict[str, Tensor | None] = dict.fromkeys(final)
    shaken = record(model, sites, run, _shaken, ends)
    if list(shaken.calls) != order or list(shaken.starts) != list(passage.starts):
        raise refusal("its blocks run in another order from one pass to the next")
    blocks, hidden = [], torch.empty(0)
    for name in order:
        if name in passage.starts:
            if not close(passage.starts[name], shaken.starts[name]):
                raise refusal(f"what goes into {name} is made from what earlier blocks gave, but is not it")
            hidden = _shaken(passage.starts[name])
        here = [site for site in sites if not isinstance(site, AttentionSite) and block_of(site.down) == name]
        with watching(model, here) as seen:
            output = drive(model, name, passage.calls[name], hidden)
        by_name = {site.name: site for site in here}
        blocks.append(_block(model, name, name in passage.starts, [by_name[n] for n in seen], hidden, output, seen))
        hidden, end = output, ends.get(name)
        if end is not None and not close(end, hidden):
            raise refusal(f"up to {name}, blocks called one by one do not give what the whole model does")
    return blocks


def _shaken(hidden: Tensor) -> Tensor:
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    return hidden + NOISE * hidden.std() * noise


def close(a: Tensor, b: Tensor) -> bool:
    """The same, but for kernels that add in another order."""
    tolerance = 0.1 * torch.finfo(a.dtype).eps ** 0.5
    return a.shape == b.shape and bool(torch.linalg.vector_norm(a - b) <= tolerance * torch.linalg.vector_norm(a))


def _block(
    model: nn.Module,
    name: str,
    starts: bool,
    sites: list[LinearSite],
    hidden: Tensor,
    output: Tensor,
    seen: dict[str, Seen],
) -> Block:
    if hidden.dim() != 3 or hidden.shape != output.shape:
        raise refusal(f"{name} makes {tuple(output.shape)} of a hidden state {tuple(hidden.shape)}")
    if any(seen[site.name].y.numel() != hidden.numel() for site in sites):
        raise refusal(f"the outputs in {name} are of another size than the hidden state")
    scales = stream_scales(hidden, output, [seen[site.name].y for site in sites])
    if scales is None:
        raise refusal(f"the output of {name} is not its input plus the outputs of {_names(sites)} (post-norm?)")
    batch_first = all(_batch_first(model, site) for site in sites)
    return Block(name, starts, tuple(sites), tuple(scales), hidden.shape[1 if batch_first else 0], batch_first)


def _batch_first(model: nn.Module, site: LinearSite) -> bool:
    if isinstance(site, ValueSite) and is_multihead(site):
        first: Any = model.get_submodule(site.attention).batch_first
        return bool(first)
    return site.batch_first


def _names(sites: Sequence[LinearSite]) -> str:
    return " and ".join(site.name for site in sites) or "any site"


def stream_scales(hidden: Tensor, output: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    """Factors per channel with output = hidden + sum of scale * part, up to rounding; None if there are none.

    They are one, or a layer scale's.
    """
    width = hidden.shape[-1]
    before, after, *outputs = (x.reshape(-1, width).cpu().double() for x in (hidden, output, *parts))
    Y = torch.stack(outputs, -1) if outputs else before.new_zeros(*before.shape, 0)  # (T, C, k)
    change = after - before
    size = before.norm(dim=0) + after.norm(dim=0) + Y.norm(dim=0).sum(-1)  # (C,)
    allowed = ROUNDING * max(torch.finfo(hidden.dtype).eps, FLOOR) * size
    ones = Y.new_ones(width, Y.shape[-1])
    gram = torch.einsum("tck,tcl->ckl", Y, Y)
    fitted = (torch.linalg.pinv(gram) @ torch.einsum("tck,tc->ck", Y, change)[..., None])[..., 0]
    for scales in (ones, fitted):
        left = (change - (Y * scales).sum(-1)).norm(dim=0)
        if bool((left <= allowed).all()):
            return [scale.contiguous() for scale in scales.unbind(-1)]
    return None
