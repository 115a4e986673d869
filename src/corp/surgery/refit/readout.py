"""Which tokens a model's output is read from: for a classifier with a class token, only that token of the last block.

Found by trials: the tokens after the first k are replaced by noise in a block's output, while the next block still
gets the original. If the model's output does not change, they are not read there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating
from corp.calibration.hooks import removing, without_fast_path
from corp.calibration.threads import here
from corp.surgery.refit.replay import Block, Run, close, stream_of


def tokens_read(model: nn.Module, blocks: Sequence[Block], run: Run) -> list[Block]:
    """The blocks, with the ends of their chains and the number of leading tokens that are read after them.

    A head may read several blocks: a block counts the tokens that are read from it and from later ones of its chain.
    """
    following = {block.name: after.name for block, after in pairwise(blocks) if not after.starts}
    inner = [block for block in blocks if block.name in following]
    most = max(block.tokens for block in blocks)
    expected = list(tensors_in(_run(model, blocks, following, run, most)))
    tapped = inner if inner and _read_of(model, inner, following, run, expected) else []
    found: list[Block] = []
    for block in reversed(blocks):
        ends = block.name not in following
        own = _read_of(model, [block], following, run, expected) if ends or block in tapped else 0
        read = own if ends else max(own, found[-1].read)
        found.append(replace(block, read=read, ends=ends))
    return found[::-1]


def _read_of(
    model: nn.Module, blocks: Sequence[Block], following: Mapping[str, str], run: Run, expected: Sequence[Tensor]
) -> int:
    """The least k such that tokens of these blocks after the first k are not read; usually all are read at the end."""
    most = max(block.tokens for block in blocks)

    def unread(k: int) -> bool:
        outputs = list(tensors_in(_run(model, blocks, following, run, k)))
        return len(outputs) == len(expected) and all(close(a, b) for a, b in zip(expected, outputs, strict=True))

    inside = all(block.name in following for block in blocks)
    if inside and unread(0):
        return 0
    if not expected or most == 1 or not unread(most - 1):
        return most
    low, high = 1, most - 1  # `high` is known to be enough
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if unread(middle) else (middle + 1, high)
    return high


def _run(model: nn.Module, blocks: Sequence[Block], following: Mapping[str, str], run: Run, k: int) -> Any:
    """The model's output if these blocks return noise after the first k tokens; the following blocks do not see it."""
    given: dict[int, Tensor] = {}  # what was replaced, by the id of the noise in its place
    noises: list[Tensor] = []  # kept alive, so that their ids are not reused

    def watch(block: Block) -> Any:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            stream = stream_of(output)
            noise = _noised(stream, block, k)
            given[id(noise)] = stream
            noises.append(noise)
            if not isinstance(output, tuple | list):
                return noise
            return [noise, *output[1:]] if isinstance(output, list) else (noise, *output[1:])

        return model.get_submodule(block.name).register_forward_hook(here(after))

    def restore(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(given.get(id(x), x) for x in args), {key: given.get(id(x), x) for key, x in kwargs.items()}

    behind = [model.get_submodule(following[block.name]) for block in blocks if block.name in following]
    handles = [module.register_forward_pre_hook(here(restore), with_kwargs=True) for module in behind]
    handles += [watch(block) for block in blocks]
    with torch.no_grad(), evaluating(model), without_fast_path(), removing(handles):
        return run()


def _noised(stream: Tensor, block: Block, k: int) -> Tensor:
    """The stream with noise of its own size after the first k tokens."""
    noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(0)).to(stream) * stream.std()
    tokens = torch.arange(block.tokens, device=stream.device) < k
    return torch.where(tokens[:, None] if block.batch_first else tokens[:, None, None], stream, noise)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Every tensor of real numbers in an output, however deep."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
        return
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, tuple | list):
        parts = output
    elif hasattr(output, "__dict__"):
        parts = vars(output).values()
    for part in parts:
        yield from tensors_in(part)
