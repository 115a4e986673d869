"""Attentions found by structure: the names and shapes of linear layers, not the classes of a library.

What is found here is a claim. If a batch can be run, adapters/proof.py verifies every claim on the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from corp.adapters.attention_names import CROSS, Parts
from corp.adapters.head_layouts import head_rows
from corp.adapters.linears import in_features, is_linear, not_linear, out_features
from corp.adapters.rotation_hints import hints_rotation, names_in, rotates_neighbours
from corp.sites import AttentionSite, Refusal, Rotary, Rows, ValueSite
from corp.surgery.hf_attention import NarrowAttention
from corp.surgery.padded import GatherLinear, Padded, ScatterLinear

NORMALISED = (
    "QK-norm divides by the length of the whole head, which pruned dimensions are part of: corp predicts it only where "
    "every head is normalised alone and then rotated, as in Qwen3"
)
_OTHER = re.compile(r"_(?:query|key)$")  # LUKE: w2e_query, between words and entities
NARROWED = "it was narrowed already; prune the dense model instead"


@dataclass(frozen=True)
class Claim:
    """The possible sites of an attention, or why it has none of a kind."""

    parts: Parts
    qk: tuple[AttentionSite, ...] = ()  # alternatives, the likeliest first
    vo: tuple[ValueSite, ...] = ()
    refused: tuple[Refusal, ...] = ()


def claim_attention(model: nn.Module, parts: Parts, note: Any) -> Claim:
    """Queries and keys, and values, of an attention found by its names; `note` adds masks and causality."""
    down = parts.down or parts.full("out")
    names = [*(parts.full(path) for path, _ in parts.makers), *([parts.down] if parts.down else [])]
    problem = next((f"{n.rpartition('.')[2]} {p}" for n in names if (p := not_linear(model.get_submodule(n)))), None)
    if any(isinstance(model.get_submodule(n), ScatterLinear | GatherLinear) for n in names):
        problem = NARROWED
    ways = [] if problem else head_rows(model, parts)
    if not ways:
        reason = problem or "its heads are not found in its shapes"
        return Claim(parts, refused=(Refusal(parts.name, "attn", reason), Refusal(down, "vo", reason)))
    module: Any = model.get_submodule(parts.name)
    refused: list[Refusal] = []
    qk: list[AttentionSite] = []
    vo: list[ValueSite] = []
    for heads, groups, rows in ways:
        kv_heads = None if groups == heads else groups
        build = Padded(rows["q"], rows["k"], rows["v"], heads, groups, parts.down)
        if parts.down and in_features(model.get_submodule(parts.down)) == heads * (rows["v"].width // groups):
            vo.append(ValueSite(parts.down, rows["v"], heads, parts.down, parts.name, build, kv_heads, padded=True))
        base = AttentionSite(parts.name, rows["q"], rows["k"], heads, build, kv_heads=kv_heads, padded=True)
        qk += [replace(base, **change) for change in rotations(module, base)]
    if normed(module):
        reason = NARROWED if isinstance(module, NarrowAttention) else NORMALISED
        refused.append(Refusal(parts.name, "attn", reason))
        qk = []
    elif qk and (problem := shared_dimensions(module, parts, qk[0])):
        refused.append(Refusal(parts.name, "attn", problem))
        qk = []
    if not vo:
        reason = "its output projection is not found" if not parts.down else "its output projection has another width"
        refused.append(Refusal(down, "vo", reason))
    return Claim(parts, tuple(note(s) for s in qk), tuple(note(s) for s in vo), tuple(refused))


def normed(module: nn.Module) -> bool:
    """Whether queries or keys are normalised, judging by the names of children that are not the identity."""
    pattern = re.compile(
        r"(?:q|k|qk|query|key|q_?a?|k_?a?)_?(?:layer_?norm|norm|ln|layernorm)$|norm_?(?:q|k)$|(?:q|k)_ln$"
    )
    return any(pattern.match(name) and not isinstance(child, nn.Identity) for name, child in module.named_children())


def shared_dimensions(module: nn.Module, parts: Parts, site: AttentionSite) -> str | None:
    """Why queries and keys cannot change their dimensions: something else meets them, also where no trial shows it.

    A table of relative positions (SAM's rel_pos_h) is often zero on a fresh model, and passes every trial; a bias per
    head has the same shape if heads are as many as dimensions. Other queries (LUKE's) are used for some inputs only.
    """
    makers = {path for path, _ in parts.makers}
    for name, child in module.named_children():
        if name not in makers and _OTHER.search(name) and is_linear(child) and out_features(child) == site.q.width:
            return f"{name} may meet the same keys or queries, for inputs that were not tried out"
    for name, table in module.named_parameters(recurse=False):
        if table.dim() == 2 and table.shape[1] == site.width != site.heads:
            return f"{name} has a number for every dimension of a query, so queries do more than meet keys"
    return None


def normalises(module: nn.Module) -> str:
    """What to add to a trial's result if an attention's code normalises its queries and keys to length one."""
    if "normalize" not in names_in(type(module)):
        return ""
    return "; its code normalises vectors, and the length of a head is not that of the dimensions that are kept"


def rotations(module: Any, site: AttentionSite) -> list[dict[str, Any]]:
    """How queries and keys may be rotated: not at all, or the first dimensions in halves or in neighbours."""
    d = site.width
    known = [getattr(module, name, None) for name in ("rotary_ndims", "rotary_dim", "rope_dim", "rotary_dims")]
    config = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None)
    for factor in (getattr(config, "partial_rotary_factor", None), rope.get("partial_rotary_factor") if rope else None):
        known.append(int(factor * d) if isinstance(factor, float) else None)
    partial = [n for n in dict.fromkeys(known) if isinstance(n, int) and 0 < n < d and n % 2 == 0]
    rotated: list[dict[str, Any]] = []
    if d % 2 or site.q.period == 3:  # an odd width has no pairs; no library rotates q, k, v interleaved per dimension
        return [{}]
    for dims in (*partial, d):
        q, k = paired(site.q, d, dims), paired(site.k, d, dims)
        halves: dict[str, Any] = {"rotary": Rotary(dims, None)}
        neighbours = {**halves, "q": q, "k": k, "build": replace(site.build, q=q, k=k)}
        rotated += [neighbours, halves] if rotates_neighbours(module) else [halves, neighbours]
    # Plain attention also passes the trial of a rotary one, and queries of another sequence are seldom rotated.
    likely = (partial or hints_rotation(module)) and not CROSS.search(site.name)
    return [*rotated, {}] if likely else [{}, *rotated]


def paired(rows: Rows, d: int, dims: int) -> Rows:
    """The rows, reordered so that neighbours (2j, 2j + 1) become (j, j + dims/2)."""
    if rows.period:
        return replace(rows, head=d, pairs=dims)
    return replace(rows, stop=rows.start + d, runs=rows.width // d, period=d, head=d, pairs=dims)
