"""How the heads of an attention lie in its linear layers, by their shapes."""

from __future__ import annotations

from typing import Any

from torch import nn

from corp.adapters.attention_names import HEADS, OUTPUT, Parts, number_of
from corp.adapters.linears import in_features, is_linear, out_features
from corp.sites import Rows

_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_kv")


def head_rows(model: nn.Module, parts: Parts) -> list[tuple[int, int, dict[str, Rows]]]:
    """(heads, key heads, rows of q, k and v) in every way that the shapes allow, the likeliest first."""
    module: Any = model.get_submodule(parts.name)
    sizes = {letters: out_features(module.get_submodule(path)) for path, letters in parts.makers}
    paths = {letters: parts.full(path) for path, letters in parts.makers}
    if "qkv" in sizes:
        return _packed(module, paths["qkv"], sizes["qkv"])
    q_rows = sizes.get("q") or sizes["qk"] // 2
    heads = number_of(module, (*HEADS, *_config_heads(module)), lambda n: q_rows % n == 0)
    if heads is None:
        return []
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
    return [(heads, groups, rows)] if heads % groups == 0 and rows["v"].width % groups == 0 else []


def _config_heads(module: Any) -> tuple[str, ...]:
    return ("encoder_attention_heads", "decoder_attention_heads") if hasattr(module, "config") else ()


def _packed(module: Any, path: str, total: int) -> list[tuple[int, int, dict[str, Rows]]]:
    """Layouts of a packed projection: all q, all k, all v; or of every (group of) head(s) one after the other."""
    found: list[tuple[int, int, dict[str, Rows]]] = []
    heads = number_of(module, (*HEADS, *_config_heads(module)))
    if heads is None:
        return []
    counts = [heads, *([known] if (known := number_of(module, _KV_HEADS, lambda n: heads % n == 0)) else []), 1]
    down = next((in_features(m) for p, m in module.named_modules() if is_linear(m) and OUTPUT.match(p)), None)
    by_head = "query_key_value" in path.rpartition(".")[2]
    for groups in dict.fromkeys(counts):
        if total % (heads + 2 * groups):
            continue
        d = total // (heads + 2 * groups)
        if down is not None and heads * d != down:
            continue
        flat = {
            "q": Rows(path, 0, heads * d),
            "k": Rows(path, heads * d, (heads + groups) * d),
            "v": Rows(path, (heads + groups) * d, total),
        }
        shared = heads // groups
        period = (shared + 2) * d
        bounds = {"q": (0, shared * d), "k": (shared * d, (shared + 1) * d), "v": ((shared + 1) * d, period)}
        nested = {
            letter: Rows(path, *bound, runs=groups, period=period if groups > 1 else 0)
            for letter, bound in bounds.items()
        }
        both = [(heads, groups, flat), (heads, groups, nested)] if groups > 1 else [(heads, groups, flat)]
        found += reversed(both) if by_head else both
    return found
