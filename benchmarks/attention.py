"""Which way through attention is fastest where queries, keys and values differ in width, and what the module gains.

For every shape the ways that corp could take are timed against the dense kernel, in one interleaved run:

    as they are       scaled_dot_product_attention with unequal widths (unfused on a CPU)
    padded            the narrower ones padded with zeros to the wider, then the fused kernel
    plain             softmax(q k^T) v by matrix products

and the whole module, projections included, dense against narrowed by corp.

    python -m benchmarks.attention [--quick]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from corp.io.tables import markdown_table
from corp.measure.timing import interleave, speed_up, summarize
from corp.sites import Projection
from corp.surgery.attention import PackedAttention, equal_widths

RESULTS = Path(__file__).parent / "results"
HEADS, DENSE = 12, 64  # DeiT-B; other sizes have fewer heads of the same width
WIDTHS = [(32, 64), (48, 64), (58, 64), (64, 32), (48, 32), (32, 32), (48, 48)]  # of q and k, of v
SHAPES = [(1, 197), (8, 197), (1, 577), (8, 50), (1, 16), (32, 64)]  # batch, tokens


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * DENSE**-0.5) @ k.mT).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=DENSE**-0.5)


def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fused(*equal_widths(q, k, v))[..., : v.shape[-1]]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"as they are": fused, "padded": padded, "plain": plain}


def kernels(batch: int, tokens: int, qk: int, v: int, rounds: int) -> dict[str, Any]:
    """Times of the ways, over the dense kernel's."""

    def heads(width: int) -> Tensor:  # as a packed projection gives them: strided views
        packed = torch.randn(batch, tokens, HEADS * width)
        return packed.reshape(batch, tokens, HEADS, width).transpose(1, 2)

    dense = [heads(DENSE) for _ in range(3)]
    narrow = [heads(qk), heads(qk), heads(v)]
    calls = [lambda: fused(*dense), *(lambda way=way: way(*narrow) for way in WAYS.values())]
    times = interleave(calls, rounds=rounds, repeats=3)
    ratios = {name: 1 / speed_up(times[0], other).value for name, other in zip(WAYS, times[1:], strict=True)}
    return {"dense ms": 1e3 * summarize(times[0]).p50, **ratios}


def module(batch: int, tokens: int, qk: int, v: int, rounds: int) -> float:
    """How much faster the narrowed module is than the dense one, projections included."""
    dim = HEADS * DENSE
    dense = import_module("timm.layers").Attention(dim, num_heads=HEADS, qkv_bias=True).eval()
    q, k, values = (Projection(torch.randn(HEADS * w, dim) / dim**0.5, torch.zeros(HEADS * w)) for w in (qk, qk, v))
    narrow = PackedAttention(dense, q, k, values)
    narrow.proj = torch.nn.Linear(HEADS * v, dim)
    x = torch.randn(batch, tokens, dim)
    with torch.inference_mode():
        first, second = interleave([lambda: dense(x), lambda: narrow(x)], rounds=rounds, repeats=3)
    return speed_up(first, second).value


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few rounds, first shapes only, nothing written")
    quick = parser.parse_args().quick
    rounds = 6 if quick else 9
    rows, table = [], []
    for batch, tokens in SHAPES[:2] if quick else SHAPES:
        for qk, v in WIDTHS[:2] if quick else WIDTHS:
            with torch.inference_mode():
                found = kernels(batch, tokens, qk, v, rounds)
            found["module speed-up"] = module(batch, tokens, qk, v, rounds)
            rows.append({"batch": batch, "tokens": tokens, "q, k": qk, "v": v, **found})
            table.append([str(value) if isinstance(value, int) else f"{value:.2f}" for value in rows[-1].values()])
            print(rows[-1], flush=True)
    if quick:
        return
    text = markdown_table(tuple(rows[0]), table)
    about = f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    note = (
        f"{HEADS} heads, dense width {DENSE}; {about}. Kernels: time over the dense kernel's at the same input: less "
        "is better. Module: how much faster the whole attention is, projections included.\n"
    )
    (RESULTS / "attention.md").write_text(f"{note}\n{text}\n", encoding="utf-8")
    (RESULTS / "attention.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
