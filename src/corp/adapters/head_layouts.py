"""How the heads of an attention are arranged in its linear layers, by their shapes."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import nn

from corp.adapters.attention_names import HEADS, OUTPUT, SIZES, Parts, number_of
from corp.adapters.linears import in_features, is_linear, out_features
from corp.sites import Rows

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_kv")


Layout: TypeAlias = tuple[int, int, dict[str, Rows]]


def head_rows(model: nn.Module, parts: Parts) -> list[Layout]:
    """All layouts (heads, key heads, rows of q, k and v) that the shapes allow, the likeliest first."""
    module: Any = model.get_submodule(parts.name)
    sizes = {letters: out_features(module.get_submodule(path)) for path, letters in parts.makers}
    paths = {letters: parts.full(path) for path, letters in parts.makers}
    if "qkv" in sizes:
        total = sizes["qkv"]
        counts = head_counts(module) or head_counts(module, 0 if total % 3 else total // 3)
        return [way for heads in counts for way in _packed(module, paths["qkv"], total, heads)]
    q_rows = sizes.get("q") or sizes["qk"] // 2
    return [way for heads in head_counts(module, q_rows) for way in _apart(paths, sizes, q_rows, heads)]


def head_counts(module: Any, width: int = 0) -> list[int]:
    """The possible numbers of heads that share `width` dimensions (0: unknown).

    The module has their number or their size under one of the usual names; a module with neither may be one head.
    """
    config = ("encoder_attention_heads", "decoder_attention_heads") if hasattr(module, "config") else ()
    named = number_of(module, (*HEADS, *config), lambda n: width % n == 0)
    if named is not None or not width:
        return [] if named is None else [named]
    size = number_of(module, SIZES, lambda n: width % n == 0)
    return [1 if size is None else width // size]


def _apart(paths: dict[str, str], sizes: dict[str, int], q_rows: int, heads: int) -> list[Layout]:
    """The layout of queries, keys and values that come from at least two layers."""
    d = q_rows // heads
    kv = sizes.get("k", q_rows if "qk" in sizes else sizes.get("kv", 0) // 2)
    if kv % d:
        return []
    groups = kv // d
    rows: dict[str, Rows] = {}
    for letters, path in paths.items():
        start = 0
        for letter in letters:
            high = q_rows if letter == "q" else kv if letter == "k" or len(letters) > 1 else sizes["v"]
            rows[letter] = Rows(path, start, start + high)
            start += high
        if start != sizes[letters]:
            return []
    return [(heads, groups, rows)] if groups and heads % groups == 0 and rows["v"].width % groups == 0 else []


def _packed(module: Any, path: str, total: int, heads: int) -> list[Layout]:
    """Layouts of a packed projection, for every number of key heads that is known."""
    counts = [heads, *([known] if (known := number_of(module, _KV_HEADS, lambda n: heads % n == 0)) else []), 1]
    down = next((in_features(m) for p, m in module.named_modules() if is_linear(m) and OUTPUT.match(p)), None)
    found: list[Layout] = []
    for groups in dict.fromkeys(counts):
        d, rest = divmod(total, heads + 2 * groups)
        if not rest and (down is None or heads * d == down):
            found += _orders(path, heads, groups, d)
    return found


def _orders(path: str, heads: int, groups: int, d: int) -> list[Layout]:
    """Layouts with all q, all k, all v; or q, k, v of each head or group in turn; or of each dimension in turn."""
    total, shared = (heads + 2 * groups) * d, heads // groups
    bounds = {"q": (0, heads * d), "k": (heads * d, (heads + groups) * d), "v": ((heads + groups) * d, total)}
    ways = [{letter: Rows(path, *bound) for letter, bound in bounds.items()}]
    if groups > 1:
        period = (shared + 2) * d
        bounds = {"q": (0, shared * d), "k": (shared * d, (shared + 1) * d), "v": ((shared + 1) * d, period)}
        ways.append({letter: Rows(path, *bound, runs=groups, period=period) for letter, bound in bounds.items()})
    if groups == heads:
        ways.append({letter: Rows(path, i, i + 1, runs=heads * d, period=3) for i, letter in enumerate("qkv")})
    if "query_key_value" in path.rpartition(".")[2]:
        ways[:2] = reversed(ways[:2])
    return [(heads, groups, way) for way in ways]
