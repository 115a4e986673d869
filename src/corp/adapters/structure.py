"""Attentions found by structure: the names and shapes of linear layers, no class of any library.

What is found here is a claim. Where a batch can be run, adapters/proof.py tries every claim out on the model.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from corp.calibration.hooks import NUMBERED
from corp.calibration.threads import has_hooks
from corp.sites import AttentionSite, Refusal, Rotary, Rows, ValueSite, is_transposed, projection_of
from corp.surgery.hf_attention import NarrowAttention
from corp.surgery.linear import why_not_linear
from corp.surgery.padded import GatherLinear, Padded, ScatterLinear

_AFFIX = r"(?:to_|w_?|lin_|linear_|in_proj_|c_|x?attn_|projection_|project_|att_proj_)?{}"
_AFFIX += r"(?:_?(?:proj|lin|linear|attn|projection|layer|dense|net))?(?:\.0)?$"
_PARTS = {
    letters: re.compile(_AFFIX.format(f"(?:{words})"), re.IGNORECASE)
    for letters, words in {
        "q": "q|query|queries|query_states",
        "k": "k|key|keys",
        "v": "v|value|values",
        "qkv": "qkv|query_key_value|attn_qkv|queries_keys_values",
        "kv": "kv|key_value|keys_values",
        "qk": "qk|query_key",
    }.items()
}
_PACKED = re.compile(r"(?:c_attn|in_proj|attn)$")  # three equal parts, if the shape says so
_OUT = re.compile(r"(?:o|wo|w_o|out|proj|dense|c_proj|o_proj|out_proj|out_lin|linear_out|to_out|output|fc_o|proj_out|"
                  r"projection|projection_layer|attention_out|out_projection|output_proj|output_projection|final_linear|output_dense|post_proj)"
                  r"(?:\.0|\.dense|\.proj)?$", re.IGNORECASE)  # fmt: skip
_BESIDE = ("output.dense", "output", "out_proj", "o_proj", "proj", "dense", "out")  # outside of the attention module
CROSS = re.compile(r"cross|encoder_attn|EncDec|encoder_attention|encoder_decoder|enc_attn", re.IGNORECASE)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_head", "nhead", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_kv")
NORMALISED = (
    "QK-norm divides by the length of the whole head, which pruned dimensions are part of: corp predicts it for Qwen3 "
    "and Gemma 3 only"
)
NARROWED = "it was narrowed already; prune the dense model instead"


def is_linear(module: object) -> bool:
    """Whether a module is a linear layer, plain or not."""
    return isinstance(module, nn.Linear) or is_transposed(module)  # type: ignore[arg-type]


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by name, in the order of registration."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def in_block(name: str) -> bool:
    """Whether a layer is inside a numbered (repeated) block."""
    return any(NUMBERED.fullmatch(part) for part in name.split(".")[:-1])


def not_linear(module: Any) -> str | None:
    """Why a layer cannot be cut; a library's own subclass of nn.Linear can if it computes what nn.Linear would."""
    problem = why_not_linear(module)
    if problem and type(module).__module__.startswith(("transformers.", "timm.")) and _acts_linear(module):
        return None
    return problem


def _acts_linear(module: Any) -> bool:
    if not isinstance(module, nn.Linear) or has_hooks(module):
        return False
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if not names <= {"weight", "bias"} or isinstance(module, ScatterLinear | GatherLinear):
        return False
    if module.weight.is_meta:
        return True
    x = torch.randn(3, module.in_features, generator=torch.Generator().manual_seed(0)).to(module.weight)
    with torch.no_grad():
        return torch.allclose(module(x), nn.functional.linear(x, module.weight, module.bias), rtol=1e-2, atol=1e-3)


def out_features(module: Any) -> int:
    return len(projection_of(module).weight)


def in_features(module: Any) -> int:
    return projection_of(module).weight.shape[1]


@dataclass(frozen=True)
class Parts:
    """An attention module's linear layers: (path below it, letters it makes) and its output projection's full name."""

    name: str
    makers: tuple[tuple[str, str], ...]
    down: str | None

    def full(self, path: str) -> str:
        return f"{self.name}.{path}" if self.name else path


def attentions(model: nn.Module, taken: set[str]) -> Iterator[Parts]:
    """Modules that make queries, keys and values, each once, of layers that no other site has taken."""
    for name, module in model.named_modules():
        parts = _parts(model, name, module)
        if parts is not None and not taken & {parts.full(path) for path, _ in parts.makers}:
            yield parts


def _parts(model: nn.Module, name: str, module: nn.Module) -> Parts | None:
    near = {path: child for path, child in module.named_modules() if is_linear(child) and _near(path)}
    makers = [(path, letters) for path, child in near.items() if (letters := letters_of(path, child))]
    if sorted("".join(letters for _, letters in makers)) != ["k", "q", "v"]:
        return None
    if len(makers) == 1 and _PACKED.match(makers[0][0]) and _number(module, _HEADS, bool, own=True) is None:
        return None  # `in_proj` and `attn` are names of other things too
    inside = [path for path in near if _OUT.match(path) and path not in dict(makers)]
    if inside:
        down: str | None = f"{name}.{inside[0]}" if name else inside[0]
    else:
        down = _beside(model, name)
    return Parts(name, tuple(makers), down)


def _near(path: str) -> bool:
    """A child, or the only layer of a wrapper around it (to_out.0, output.dense)."""
    return path.count(".") == 0 or (path.count(".") == 1 and path.endswith((".0", ".dense", ".proj", ".linear")))


def letters_of(path: str, layer: nn.Module) -> str:
    """What comes out of a layer of this name: some of q, k and v in order, or nothing that is known."""
    for letters, pattern in _PARTS.items():
        if pattern.match(path):
            return letters
    return "qkv" if _PACKED.match(path) else ""


def _beside(model: nn.Module, name: str) -> str | None:
    """The output projection of an attention that does not hold it (BERT: attention.self, attention.output.dense)."""
    parent = name.rpartition(".")[0]
    for path in _BESIDE:
        full = f"{parent}.{path}" if parent else path
        try:
            found = model.get_submodule(full)
        except AttributeError:
            continue
        if is_linear(found):
            return full
    return None


def _number(module: Any, names: tuple[str, ...], fits: Any, *, own: bool = False) -> int | None:
    """The first whole number under one of these names, in the module or (unless `own`) its config, that fits."""
    for owner in (module, None if own else getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0 and fits(value):
                return value
    return None


def head_rows(model: nn.Module, parts: Parts) -> list[tuple[int, int, dict[str, Rows]]]:
    """(heads, key heads, rows of q, k and v) in every way that the shapes allow, the likeliest first."""
    module: Any = model.get_submodule(parts.name)
    sizes = {letters: out_features(module.get_submodule(path)) for path, letters in parts.makers}
    paths = {letters: parts.full(path) for path, letters in parts.makers}
    if "qkv" in sizes:
        return _packed(module, paths["qkv"], sizes["qkv"])
    q_rows = sizes.get("q") or sizes["qk"] // 2
    heads = _number(module, (*_HEADS, *_config_heads(module)), lambda n: q_rows % n == 0)
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
    heads = _number(module, (*_HEADS, *_config_heads(module)), lambda n: total % n == 0 or True)
    if heads is None:
        return []
    counts = [heads, *([known] if (known := _number(module, _KV_HEADS, lambda n: heads % n == 0)) else []), 1]
    down = next((in_features(m) for p, m in module.named_modules() if is_linear(m) and _OUT.match(p)), None)
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


@dataclass(frozen=True)
class Claim:
    """The sites that an attention may have, and why there is none of a kind."""

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
    if not vo:
        reason = "its output projection is not found" if not parts.down else "its output projection has another width"
        refused.append(Refusal(down, "vo", reason))
    return Claim(parts, tuple(note(s) for s in qk), tuple(note(s) for s in vo), tuple(refused))


def normed(module: nn.Module) -> bool:
    """Whether queries or keys are normalised, told by the names of children that are more than the identity."""
    pattern = re.compile(
        r"(?:q|k|qk|query|key|q_?a?|k_?a?)_?(?:layer_?norm|norm|ln|layernorm)$|norm_?(?:q|k)$|(?:q|k)_ln$"
    )
    return any(pattern.match(name) and not isinstance(child, nn.Identity) for name, child in module.named_children())


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
    for dims in (*partial, d) if d % 2 == 0 else ():
        q, k = paired(site.q, d, dims), paired(site.k, d, dims)
        halves: dict[str, Any] = {"rotary": Rotary(dims, None)}
        neighbours = {**halves, "q": q, "k": k, "build": replace(site.build, q=q, k=k)}
        rotated += [neighbours, halves] if _rotates_neighbours(module) else [halves, neighbours]
    # Plain attention passes the trial of a rotary one too, and queries of another sequence are seldom rotated.
    likely = (partial or hints_rotation(module)) and not CROSS.search(site.name)
    return [*rotated, {}] if likely else [{}, *rotated]


def _rotates_neighbours(module: Any) -> bool:
    """Whether the library's own function, beside the module's class, rotates neighbours instead of halves."""
    beside = sys.modules.get(type(module).__module__)
    if hasattr(beside, "rotate_every_two"):
        return True
    function = getattr(beside, "rotate_half", None)
    if function is None:
        return getattr(module, "rotate_half", True) is False  # as timm's attentions say it
    try:
        return bool(function(torch.arange(4.0, device="cpu"))[0] == -1)
    except Exception:  # of other arguments than one tensor
        return False


def paired(rows: Rows, d: int, dims: int) -> Rows:
    """The rows, read so that the neighbours (2j, 2j + 1) come as (j, j + dims/2)."""
    if rows.period:
        return replace(rows, head=d, pairs=dims)
    return replace(rows, stop=rows.start + d, runs=rows.width // d, period=d, head=d, pairs=dims)


def hints_rotation(module: Any) -> bool:
    names = set(type(module).forward.__code__.co_varnames) | set(type(module).forward.__code__.co_names)
    return any(word in name for name in names for word in ("rotary", "rope", "rot_emb", "position_embeddings"))
