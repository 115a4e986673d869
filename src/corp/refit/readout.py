"""Which tokens a model's output is read from: of a classifier with a class token, only that one, in the last block.

Found by trying: the tokens behind the first k are replaced by noise where the last block gives them, and if the model's
output does not change, they are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating
from corp.calibration.hooks import removing, without_fast_path
from corp.refit.replay import Block, Run, close, stream_of


def tokens_read(model: nn.Module, blocks: Sequence[Block], run: Run) -> list[Block]:
    """The blocks, knowing where their chain ends and how many leading tokens of its end are read."""
    found: list[Block] = []
    chain: list[Block] = []
    for number, block in enumerate(blocks):
        chain.append(block)
        if number + 1 == len(blocks) or blocks[number + 1].starts:
            read = _read_of(model, block, run)
            found += [replace(one, read=read, ends=one is block) for one in chain]
            chain = []
    return found


def _read_of(model: nn.Module, last: Block, run: Run) -> int:
    """The least k such that tokens behind the first k are not read; of most models, all."""
    expected = list(tensors_in(_run(model, last, run, last.tokens)))

    def unread(k: int) -> bool:
        outputs = list(tensors_in(_run(model, last, run, k)))
        return len(outputs) == len(expected) and all(close(a, b) for a, b in zip(expected, outputs, strict=True))

    if not expected or last.tokens == 1 or not unread(last.tokens - 1):
        return last.tokens
    low, high = 1, last.tokens - 1  # `high` is known to do
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if unread(middle) else (middle + 1, high)
    return high


def _run(model: nn.Module, last: Block, run: Run, k: int) -> Any:
    """The model's output when the last block gives noise behind the first k tokens."""

    def after(_module: nn.Module, _args: Any, output: Any) -> Any:
        stream = stream_of(output)
        noise = torch.randn(stream.shape, generator=torch.Generator().manual_seed(0)).to(stream) * stream.std()
        tokens = torch.arange(last.tokens, device=stream.device) < k
        kept = tokens[:, None] if last.batch_first else tokens[:, None, None]
        mixed = torch.where(kept, stream, noise)
        return (
            (mixed, *output[1:])
            if isinstance(output, tuple)
            else [mixed, *output[1:]]
            if isinstance(output, list)
            else mixed
        )

    handle = model.get_submodule(last.name).register_forward_hook(after)
    with torch.no_grad(), evaluating(model), without_fast_path(), removing([handle]):
        return run()


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
