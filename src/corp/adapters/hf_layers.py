"""The description of a family of transformers models, and the sites that follow from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from corp.adapters.linears import child, not_plain
from corp.adapters.multihead import KNOWN, multihead
from corp.sites import AttentionSite, Finding, Mask, MLPSite, QKNorm, Refusal, Rotary, Rows, ValueSite, projection_of
from corp.surgery.hf_attention import NarrowAttention, RotaryAttention, narrow, rotated_dims
from corp.surgery.hf_names import Names

MASK = "attention_mask"


@dataclass(frozen=True)
class Attention:
    """An attention of a layer: where it is, its exact class, and which tokens it sees.

    `out` is the path of an output projection outside the module, from the layer. `causal` may be a function of the
    model that owns the layer and of the module. Masks are arguments of that model's forward. The gain of its norms, if
    it has any, is their weight plus `gain_shift`.
    """

    path: str
    cls: str
    names: Names
    out: str | None = None
    causal: Callable[[Any, Any], bool] | bool = False
    cross: bool = False
    q_mask: str | None = MASK
    k_mask: str | None = MASK
    convention: type[NarrowAttention] = NarrowAttention
    refuse: Callable[[Any], str | None] = lambda _module: None
    window: Callable[[Any], int | None] = lambda _module: None
    gain_shift: float = 0.0


@dataclass(frozen=True)
class Mlp:
    """An MLP of a layer: the linear layers that make its channels, the one that consumes them, and the site's `name`.

    An MLP that is a separate module has an exact class; several may be possible.
    """

    name: str
    up: tuple[str, ...]
    down: str
    cls: str | None = None
    mask: str | None = MASK


@dataclass(frozen=True)
class Layer:
    """The parts of one layer class; of `mlps`, the first whose class matches."""

    attentions: tuple[Attention, ...] = ()
    mlps: tuple[Mlp, ...] = ()


@dataclass(frozen=True)
class Family:
    """The layer classes of one modeling file of transformers, by name."""

    module: str  # under transformers.models
    layers: dict[str, Layer] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"transformers.models.{self.module}"


def family(package: str, layer: str, *parts: Attention | Mlp) -> Family:
    """A family with one layer class, in the modeling file that has the package's name."""
    attentions = tuple(part for part in parts if isinstance(part, Attention))
    mlps = tuple(part for part in parts if isinstance(part, Mlp))
    return Family(f"{package}.modeling_{package}", {layer: Layer(attentions, mlps)})


def find_in(model: nn.Module, families: dict[str, Family]) -> Iterator[Finding]:
    """The sites of all layers of known classes, each with the innermost model that owns it."""
    owners: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            owners.append(name)
        family = families.get(type(module).__module__)
        layer = family.layers.get(type(module).__name__) if family else None
        if layer is None or family is None:
            continue
        owner = max((o for o in owners if _inside(name, o)), key=len)
        for attention in layer.attentions:
            yield from attention_sites(model, name, owner, attention, family)
        yield from _mlps(module, name, owner, layer.mlps, family)


def _inside(name: str, owner: str) -> bool:
    return owner == "" or name.startswith(f"{owner}.")


def attention_sites(model: nn.Module, layer: str, owner: str, entry: Attention, family: Family) -> Iterator[Finding]:
    name = f"{layer}.{entry.path}"
    module: Any = child(model, name)
    if module is None:
        return  # this model has no such cross-attention
    if type(module) in KNOWN:
        yield from multihead(name, module)
        return
    names = entry.names
    down = f"{layer}.{entry.out}" if entry.out else f"{name}.{names.out[0]}"
    before = isinstance(module, NarrowAttention)
    dense_class = module.dense_class if before else type(module)
    if (dense_class.__module__, dense_class.__name__) != (family.path, entry.cls):
        yield from _refused(name, down, f"{type(module).__module__}.{type(module).__name__} is not understood")
        return
    rotated = issubclass(entry.convention, RotaryAttention)
    if rotated and before:
        yield from _refused(name, down, "this rotary attention was narrowed already; prune the dense model instead")
        return
    problem = entry.refuse(module) or not_plain(module, *(part for part, _ in names.parts), *names.out[:1])
    if problem:
        yield from _refused(name, down, problem)
        return
    heads, kv_heads = names.count_heads(module)
    build = partial(narrow, names=names, cross=entry.cross, lookup=kernel, convention=entry.convention)
    q_mask = Mask(owner, entry.q_mask) if entry.q_mask else None
    causal = entry.causal if isinstance(entry.causal, bool) else entry.causal(model.get_submodule(owner), module)
    yield AttentionSite(
        name,
        q=_rows(module, name, names, "q"),
        k=_rows(module, name, names, "k"),
        heads=heads,
        build=build,
        q_mask=q_mask,
        k_mask=Mask(owner, entry.k_mask) if entry.k_mask else None,
        causal=causal,
        window=entry.window(module),
        kv_heads=None if kv_heads == heads else kv_heads,
        rotary=Rotary(rotated_dims(module)) if rotated else None,
        scale=getattr(module, names.scale) if rotated and names.scale else 1.0,
        norm=_norm(module, name, entry),
    )
    if problem := not_plain(model, down):
        yield Refusal(down, "vo", problem)
        return
    yield ValueSite(
        down,
        v=_rows(module, name, names, "v"),
        heads=heads,
        down=down,
        attention=name,
        build=build,
        kv_heads=None if kv_heads == heads else kv_heads,
        mask=q_mask,
    )


def _norm(module: Any, name: str, entry: Attention) -> QKNorm | None:
    """Where the heads of a module that has not been narrowed are normalised."""
    if not entry.names.norms:
        return None
    norms = [getattr(module, part) for part in entry.names.norms]
    eps = next(float(getattr(norms[0], word)) for word in ("variance_epsilon", "eps") if hasattr(norms[0], word))
    q, k = (f"{name}.{part}" for part in entry.names.norms)
    return QKNorm(q, k, eps, entry.gain_shift)


def _refused(name: str, down: str, reason: str) -> list[Refusal]:
    """Refusals of queries and keys and of values, which are parts of one module."""
    return [Refusal(name, "attn", reason), Refusal(down, "vo", reason)]


def _rows(module: Any, name: str, names: Names, letter: str) -> Rows:
    """The rows of queries, keys or values, in a separate layer or packed with others."""
    linear, letters = next((part, letters) for part, letters in names.parts if letter in letters)
    total = len(projection_of(getattr(module, linear)).weight)
    heads, kv_heads = names.count_heads(module)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    value = names.value_width(module)
    others = sum(counts[one] for one in letters if one != "v")
    width = (total - ("v" in letters) * kv_heads * value) // others if others else 0  # of a query or key head
    if names.by_head:
        start = letters.index(letter) * width
        return Rows(f"{name}.{linear}", start, start + width, runs=heads, period=total // heads)
    start = sum(counts[one] * width for one in letters[: letters.index(letter)])
    return Rows(f"{name}.{linear}", start, start + counts[letter] * (value if letter == "v" else width))


def _mlps(layer: nn.Module, name: str, owner: str, entries: tuple[Mlp, ...], family: Family) -> Iterator[Finding]:
    """The MLP of a layer, of any of the possible classes."""
    for entry in entries:
        site = f"{name}.{entry.name}" if name else entry.name
        if entry.cls is not None and not _is(child(layer, entry.name), family, entry.cls):
            continue
        linears = (*entry.up, entry.down)
        if problem := not_plain(layer, *linears):
            yield Refusal(site, "mlp", problem)
        elif getattr(layer, "chunk_size_feed_forward", 0) or _chunked(layer, entry):
            yield Refusal(site, "mlp", "it runs over pieces of the sequence; set config.chunk_size_feed_forward = 0")
        else:
            width = projection_of(layer.get_submodule(entry.down)).weight.shape[1]
            up = tuple(
                Rows(f"{name}.{linear}", start, start + width)  # gate and up may be packed in one
                for linear in entry.up
                for start in range(0, len(projection_of(layer.get_submodule(linear)).weight), width)
            )
            yield MLPSite(site, up, f"{name}.{entry.down}", mask=Mask(owner, entry.mask) if entry.mask else None)
        return
    if entries:
        found: Any = child(layer, entries[0].name)
        reason = f"{type(found).__module__}.{type(found).__name__} is not understood"
        yield Refusal(f"{name}.{entries[0].name}", "mlp", reason)


def _chunked(layer: nn.Module, entry: Mlp) -> bool:
    return bool(getattr(child(layer, entry.name), "chunk_size_feed_forward", 0))


def _is(module: Any, family: Family, cls: str) -> bool:
    """Whether the module has exactly this type; a subclass may compute something else."""
    return (type(module).__module__, type(module).__name__) == (family.path, cls)


def kernel(module: Any) -> Callable[..., Any]:
    """The attention function that the library uses for this module, looked up at every call as in the library."""
    eager = sys.modules[module.dense_class.__module__].eager_attention_forward
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    return found
