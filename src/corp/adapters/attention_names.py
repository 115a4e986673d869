"""Attentions found by the names of their linear layers, in any library."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from corp.adapters.linears import is_linear
from corp.sites import Refusal
from corp.surgery.linear import why_not_linear

_AFFIX = r"(?:to_|w_?|lin_|linear_|in_proj_|c_|x?attn_|projection_|project_|att_proj_|proj_|fc_|dense_)?{}"
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
_PACKED = re.compile(r"(?:c_attn|in_proj|attn)$")  # three equal parts, if the shape allows it
OUTPUT = re.compile(r"(?:o|wo|w_o|out|proj|dense|c_proj|o_proj|out_proj|out_lin|linear_out|to_out|output|fc_o|proj_out|"
                  r"merge|projection|projection_layer|attention_out|out_projection|output_proj|output_projection|final_linear|"
                  r"output_dense|post_proj)"
                  r"(?:\.0|\.dense|\.proj)?$", re.IGNORECASE)  # fmt: skip
_BESIDE = ("output.dense", "output", "out_proj", "o_proj", "proj", "dense", "out")  # outside the attention module
CROSS = re.compile(r"cross|encoder_attn|EncDec|encoder_attention|encoder_decoder|enc_attn", re.IGNORECASE)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "num_head", "nhead", "attention_heads")
SIZES = ("head_dim", "dim_head", "d_head", "head_size", "dim_per_head", "attention_head_size", "d_k", "head_width")


@dataclass(frozen=True)
class Parts:
    """An attention module's linear layers, (path below it, letters of outputs), and its output projection's name."""

    name: str
    makers: tuple[tuple[str, str], ...]
    down: str | None

    def full(self, path: str) -> str:
        return f"{self.name}.{path}" if self.name else path


def is_vague(parts: Parts) -> bool:
    """Whether a single layer makes all of q, k and v, under a name that other things have too (`in_proj`, `attn`)."""
    return len(parts.makers) == 1 and _PACKED.match(parts.makers[0][0]) is not None


def attentions(model: nn.Module) -> dict[str, Parts]:
    """Modules that compute queries, keys and values, by name."""
    found = {name: _parts(model, name, module) for name, module in model.named_modules()}
    return {name: parts for name, parts in found.items() if parts is not None}


def untaken(found: Iterable[Parts], taken: set[str]) -> Iterator[Parts]:
    """Those whose layers belong to no other site."""
    return (parts for parts in found if not taken & {parts.full(path) for path, _ in parts.makers})


def _parts(model: nn.Module, name: str, module: nn.Module) -> Parts | None:
    near = {path: child for path, child in module.named_modules() if is_linear(child) and _near(path)}
    makers = [(path, letters) for path, child in near.items() if (letters := letters_of(path))]
    if not makers and (listed := _listed(module)):
        return Parts(name, tuple(zip(listed, "qkv", strict=False)), f"{name}.{listed[3]}" if name else listed[3])
    if sorted("".join(letters for _, letters in makers)) != ["k", "q", "v"]:
        return None
    if is_vague(Parts(name, tuple(makers), None)) and number_of(module, HEADS, own=True) is None:
        return None
    inside = [path for path in near if OUTPUT.match(path) and path not in dict(makers)]
    if inside:
        down: str | None = f"{name}.{inside[0]}" if name else inside[0]
    else:
        down = _beside(model, name)
    return Parts(name, tuple(makers), down)


def _listed(module: nn.Module) -> list[str]:
    """Four linear layers of one shape in a list, in the order of queries, keys, values and output."""
    for name, child in module.named_children():
        layers: list[Any] = list(child) if isinstance(child, nn.ModuleList) else []
        if len(layers) == 4 and all(map(is_linear, layers)) and len({layer.weight.shape for layer in layers}) == 1:
            # Last, because few modules have such a list, and asking for sixteen names takes longest.
            known = number_of(module, (*HEADS, *SIZES), own=True) is not None
            return [f"{name}.{i}" for i in range(4)] if known else []
    return []


def wrapped(model: nn.Module, makers: Iterable[tuple[str, list[str]]]) -> Iterator[Refusal]:
    """Attentions whose queries, keys or values do not come from a linear layer (but from LoRA, a convolution)."""
    for name, paths in makers:
        problem = why_not_linear(model.get_submodule(f"{name}.{paths[0]}" if name else paths[0]))
        yield Refusal(name, "attn", f"{paths[0]} {problem}")
        yield Refusal(f"{name}.out" if name else "out", "vo", f"{paths[0]} {problem}")


def wrapped_makers(model: nn.Module, found: Container[str]) -> Iterator[tuple[str, list[str]]]:
    """Attentions not in `found`, with those of their makers of queries, keys and values that are no linear layers."""
    for name, module in model.named_modules():
        if name in found:
            continue
        makers = {path: child for path, child in module.named_children() if path != "attn" and letters_of(path)}
        odd = [path for path, child in makers.items() if not is_linear(child) and _has_matrix(child)]
        if odd and sorted("".join(map(letters_of, makers))) == ["k", "q", "v"]:
            yield name, odd


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _near(path: str) -> bool:
    """Whether the path is a child, or the only layer of a wrapper around it (to_out.0, output.dense)."""
    return path.count(".") == 0 or (path.count(".") == 1 and path.endswith((".0", ".dense", ".proj", ".linear")))


def letters_of(path: str) -> str:
    """The outputs of a layer of this name: some of q, k and v in order, or nothing if unknown."""
    for letters, pattern in _PARTS.items():
        if pattern.match(path):
            return letters
    return "qkv" if _PACKED.match(path) else ""


def _beside(model: nn.Module, name: str) -> str | None:
    """The output projection outside the attention's module (BERT: attention.self, attention.output.dense)."""
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


def number_of(
    module: Any, names: tuple[str, ...], fits: Callable[[int], bool] = bool, *, own: bool = False
) -> int | None:
    """The first whole number under one of these names, in the module or (unless `own`) its config, that fits."""
    for owner in (module, None if own else getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0 and fits(value):
                return value
    return None
