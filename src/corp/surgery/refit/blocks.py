"""The blocks of a model: the order in which they run, and what the outputs of their sites are added to.

They are found by running them, so that this works for any code: blocks that are run one by one must reproduce the
whole model, and a block's output must be the sum of its input and its sites' outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.hooks import block_of, input_of, removing
from corp.calibration.threads import here
from corp.numerics.place import Place
from corp.sites import AttentionSite, LinearSite, MLPSite, Site, ValueSite, is_pointwise
from corp.surgery.refit.readout import tensors_in
from corp.surgery.refit.replay import (
    Block,
    Call,
    Passage,
    Run,
    Seen,
    close,
    drive,
    is_multihead,
    record,
    record_calls,
    refusal,
    watching,
)

NOISE = 0.1  # times its size, added to a hidden state to test whether running blocks reproduces the model
ROUNDING = 8  # tolerance, in rounding errors of the stream, when a block must equal its input plus its sites' outputs
FLOOR = 1e-12  # rounding errors in float64 are smaller than those of measuring them
MOST_FED = 8  # chains that take something from earlier ones: each costs a pass of the pruned model


def examine(model: nn.Module, sites: Sequence[Site], run: Run) -> list[Block]:
    """The model's blocks in the order of the data, if they can be run one by one; otherwise an error says why not.

    For every chain the whole model is run again with other hidden states at its start, and blocks that are run from
    those must reproduce its end. This reveals changes of the stream between blocks and inputs that come another way.
    It also reveals which later chains take something from this one (a decoder, the language model behind a tower).
    """
    if routed := next((site for site in sites if isinstance(site, MLPSite) and site.experts), None):
        raise refusal(f"{routed.experts} holds experts, and their routing depends on the layers before them")
    if odd := next((s for s in sites if isinstance(s, MLPSite) and is_pointwise(model.get_submodule(s.down))), None):
        raise refusal(f"{odd.down} is a convolution; only linear layers are refitted")
    passage = record(model, sites, run)
    order = list(passage.calls)
    if not order:
        raise refusal("it has no numbered blocks that the data passes")
    blocks: list[Block] = []
    chains, fed = _chains(passage), set[str]()
    for chain in chains:
        ends: dict[str, Tensor | None] = {chain[-1]: None}
        shaken = record_calls(model, order, run, {chain[0]: _shaken}, ends)
        if list(shaken.calls) != order or list(shaken.starts) != list(passage.starts):
            raise refusal("its blocks run in a different order in every pass")
        fed |= {other[0] for other in chains if other is not chain and not _same(passage, shaken, other)}
        if len(fed) > MOST_FED:
            raise refusal(
                f"the inputs of {len(fed)} blocks, such as {min(fed)}, are computed from an earlier block's output "
                "instead of being that output"
            )
        own, output = _run_chain(model, sites, chain, passage)
        blocks += [replace(block, fed=block.name in fed) for block in own]
        end = ends[chain[-1]]
        if end is None or not close(end, output):
            raise refusal(f"calling its blocks one by one, up to {chain[-1]}, does not reproduce the whole model")
    return blocks


def _run_chain(
    model: nn.Module, sites: Sequence[Site], chain: Sequence[str], passage: Passage
) -> tuple[list[Block], Tensor]:
    """The blocks of a chain, run one by one from another hidden state, and the last one's output."""
    blocks, hidden = [], _shaken(passage.starts[chain[0]])
    for name in chain:
        here = [site for site in sites if not isinstance(site, AttentionSite) and block_of(site.down) == name]
        with watching(model, here) as seen:
            output = drive(model, name, passage.calls[name], hidden)
        by_name = {site.name: site for site in here}
        call, in_order = passage.calls[name], [by_name[n] for n in seen]
        blocks.append(_block(model, name, name == chain[0], in_order, hidden, output, seen, call))
        hidden = output
    return blocks, hidden


def _chains(passage: Passage) -> list[list[str]]:
    """The blocks in order, a list per chain."""
    chains: list[list[str]] = []
    for name in passage.calls:
        if name in passage.starts:
            chains.append([])
        chains[-1].append(name)
    return chains


def _same(one: Passage, other: Passage, chain: Sequence[str]) -> bool:
    """Whether a chain starts with the same hidden state in both passes, and its blocks take the same numbers."""

    def numbers(passage: Passage) -> list[Tensor]:
        calls = [passage.calls[name] for name in chain]
        return [passage.starts[chain[0]], *tensors_in([[call.args, call.kwargs] for call in calls])]

    pairs = list(zip_longest(numbers(one), numbers(other)))
    return all(a is not None and b is not None and close(a, b) for a, b in pairs)


def _shaken(hidden: Tensor) -> Tensor:
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden)
    return hidden + NOISE * hidden.std() * noise


def _block(
    model: nn.Module,
    name: str,
    starts: bool,
    sites: list[LinearSite],
    hidden: Tensor,
    output: Tensor,
    seen: dict[str, Seen],
    call: Call,
) -> Block:
    if hidden.dim() != 3 or hidden.shape != output.shape:
        raise refusal(f"{name} turns a hidden state of shape {tuple(hidden.shape)} into one of {tuple(output.shape)}")
    if any(seen[site.name].y.numel() != hidden.numel() for site in sites):
        raise refusal(f"layers in {name} have outputs of another size than the hidden state")
    junctions: tuple[str, ...] = ()
    scales = stream_scales(hidden, output, [seen[site.name].y for site in sites])
    if scales is None:
        junctions = find_junctions(model, name, sites, hidden, call)
        scales = [torch.ones(hidden.shape[-1], dtype=torch.float64) for _ in junctions]
    if len(scales) != len(sites):
        raise refusal(f"the output of {name} is not its input plus the outputs of {_names(sites)}, nor a norm of that")
    batch_first = all(_batch_first(model, site) for site in sites)
    tokens = hidden.shape[1 if batch_first else 0]
    return Block(name, starts, tuple(sites), tuple(scales), tokens, batch_first, junctions=junctions)


def find_junctions(
    model: nn.Module, name: str, sites: Sequence[LinearSite], hidden: Tensor, call: Call
) -> tuple[str, ...]:
    """The modules of a post-norm block whose inputs are a site's output plus the stream; empty for other blocks."""
    met: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(inner: str, module: nn.Module) -> Any:
        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = input_of(args, kwargs) if args or kwargs else None
            if isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == hidden.shape:
                met[inner] = x.clone(), output.clone()

        return module.register_forward_hook(here(after), with_kwargs=True)

    inside_it = [(n, m) for n, m in model.get_submodule(name).named_modules(prefix=name) if n != name]
    with removing([watch(*one) for one in inside_it]), watching(model, sites) as seen:
        output = drive(model, name, call, hidden)
    found, before = [], hidden
    for site in sites:
        y = seen[site.name].y
        at = next(
            (n for n, (x, made) in met.items() if made.shape == x.shape == y.shape and close(before, x - y)), None
        )
        if at is None:
            return ()
        found.append(at)
        before = met[at][1]
    return tuple(found) if close(before, output) else ()


def _batch_first(model: nn.Module, site: LinearSite) -> bool:
    if isinstance(site, ValueSite) and is_multihead(site):
        first: Any = model.get_submodule(site.attention).batch_first
        return bool(first)
    return site.batch_first


def _names(sites: Sequence[LinearSite]) -> str:
    return " and ".join(site.name for site in sites) or "any site"


def stream_scales(hidden: Tensor, output: Tensor, parts: Sequence[Tensor]) -> list[Tensor] | None:
    """Factors per channel with output = hidden + sum of scale * part, up to rounding; None if there are none.

    They are ones or a layer scale.
    """
    width = hidden.shape[-1]
    before, after, *outputs = (x.reshape(-1, width).to(*Place.exactly(x.device)) for x in (hidden, output, *parts))
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
