"""Which widths this machine's kernels like: time of MLPs and attentions at odd widths, against the next multiple up.

Every pair is timed in turn, round after round, and compared within each round (corp.measure.timing), so that a busy
machine shifts both. A ratio above 1 says that the wider, rounded layer is the faster one; `work` is what rounding adds.
The rule of round_to="auto" (corp/recipe/rounding.py) follows from this table.

    python -m benchmarks.rounding --batch 8 --rounds 30 --out benchmarks/results/rounding.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

TOKENS = 197
MLPS = {"tiny": (192, 768), "small": (384, 1536), "base": (768, 3072)}  # channels of the stream, of the MLP
HEADS = {"tiny": (3, 64), "small": (6, 64), "base": (12, 64)}
MULTIPLES = (2, 4, 8, 16, 32, 64)
SHARES = (0.9, 0.75, 0.6, 0.5)  # kept


def mlp(stream: int, width: int, batch: int) -> Callable[[], Any]:
    layers = nn.Sequential(nn.Linear(stream, width), nn.GELU(), nn.Linear(width, stream)).eval()
    x = torch.randn(batch, TOKENS, stream)
    return lambda: layers(x)


def attention(heads: int, width: int, batch: int) -> Callable[[], Any]:
    """Scaled dot products with queries, keys and values of one width, as the fused kernel wants them."""
    q, k, v = (torch.randn(batch, heads, TOKENS, width) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, scale=0.125)


def ratio(first: Callable[[], Any], second: Callable[[], Any], rounds: int) -> float:
    """How many times as long the first takes: the median over rounds in which both run."""
    found = []
    for _ in range(rounds + 3):
        times = []
        for call in (first, second):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        found.append(times[0] / times[1])
    return statistics.median(found[3:])


def rows(batch: int, rounds: int) -> Iterator[dict[str, Any]]:
    for name, (stream, dense) in MLPS.items():
        for kept in SHARES:
            yield from compare(name, "mlp", round(dense * kept) | 1, dense, partial(mlp, stream, batch=batch), rounds)
    for name, (heads, dense) in HEADS.items():
        for kept in SHARES:
            yield from compare(
                name, "head", round(dense * kept) | 1, dense, partial(attention, heads, batch=batch), rounds
            )


def compare(
    name: str, kind: str, odd: int, dense: int, make: Callable[[int], Callable[[], Any]], rounds: int
) -> Iterator[dict[str, Any]]:
    narrow = make(odd)
    for multiple in MULTIPLES:
        up = min(dense, -(-odd // multiple) * multiple)
        yield {
            "model": name, "kind": kind, "odd": odd, "multiple": multiple, "rounded": up, "work": up / odd,
            "ratio": ratio(narrow, make(up), rounds),
        }  # fmt: skip
    yield {"model": name, "kind": kind, "odd": odd, "rounded": dense, "ratio": ratio(make(dense), narrow, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    found = []
    with torch.no_grad():
        for row in rows(options.batch, options.rounds):
            found.append(row)
            what = f"x{row['multiple']:<3}" if "multiple" in row else "dense"
            print(f"{row['model']:6} {row['kind']:5} {row['odd']:5} -> {row['rounded']:5} {what:6} {row['ratio']:.3f}")
    if options.out:
        options.out.write_text(json.dumps({"batch": options.batch, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
