"""Where prunable things are in a model: plain data, found by an adapter, followed by everything else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from corp.errors import CorpError, ModelError
from corp.tables import Tabular


@dataclass(frozen=True)
class Rows:
    """Output features `start:stop` of the linear layer called `module`.

    `weight` and `bias` are its parameters' names: nn.MultiheadAttention keeps a linear map as bare parameters.
    Where heads are packed one by one (q, k, v of the first head, then of the second …), the features come in `runs`,
    each `period` after the one before. Rotary pairs are read as (j, j + pairs/2); where the layer has them as
    neighbours (2j, 2j + 1), `pairs` says how many of the `head` dimensions of every head are; `index` reorders them.
    """

    module: str
    start: int
    stop: int
    weight: str = "weight"
    bias: str = "bias"
    runs: int = 1
    period: int = 0
    head: int = 0
    pairs: int = 0

    @property
    def bare(self) -> bool:
        """Bare parameters of nn.MultiheadAttention, which is never called as a layer."""
        return self.weight != "weight"

    @property
    def width(self) -> int:
        return self.runs * (self.stop - self.start)

    @property
    def index(self) -> slice | list[int]:
        """What picks them out of the layer's output features."""
        return self.positions if self.period else slice(self.start, self.stop)

    @property
    def head_order(self) -> list[int] | None:
        """How the dimensions of one head are reordered, if they are."""
        return _halves_first(self.head, self.head, self.pairs) if self.pairs else None

    @property
    def positions(self) -> list[int]:
        """The features' places, one by one."""
        if not self.period:
            return list(range(self.start, self.stop))
        order = _halves_first(self.stop - self.start, self.head, self.pairs)
        return [i * self.period + self.start + j for i in range(self.runs) for j in order]


def _halves_first(width: int, head: int, pairs: int) -> list[int]:
    """Positions of `width` dimensions, heads of `head` each, the first `pairs` of them as 0, 2, 4 …, 1, 3, 5 …"""
    if not pairs:
        return list(range(width))
    one = [*range(0, pairs, 2), *range(1, pairs, 2), *range(pairs, head)]
    return [h + j for h in range(0, width, head) for j in one]


@dataclass(frozen=True)
class Mask:
    """Which tokens are real: the `argument` of the forward call of `module`, (B, n); absent or None means all.

    True or 1 marks a real token, or, where `marks_padding`, what is none (torch.nn's convention). Where that module is
    given no such mask but one derived from it, the first module `around` it that is given one says.
    """

    module: str
    argument: str
    marks_padding: bool = False
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class MLPSite:
    """Hidden channels: made by the rows `up` (two sets of them in a gated MLP), consumed by the linear `down`.

    Its tokens come as (B, n, D), or (n, B, D) if not `batch_first`. An expert sees only the tokens that are routed to
    it; `experts` is the module that holds it and its like, which all keep one width.
    """

    name: str
    up: tuple[Rows, ...]
    down: str
    mask: Mask | None = None
    batch_first: bool = True
    experts: str | None = None
    kind: ClassVar[str] = "mlp"

    @property
    def width(self) -> int:
        return self.up[0].width

    @property
    def inputs(self) -> int:
        """Features that go into the linear `down`."""
        return self.width


@dataclass(frozen=True)
class ValueSite:
    """Values of all heads: made by the rows `v`, averaged by the attention, consumed by the linear `down`.

    `attention` is the module that is replaced, by `build` as for its queries and keys. Groups of query heads may share
    a value head (`kv_heads` of them); `down` takes every query head's own average of it. `padded`: the attention's
    own code stays and computes at the dense width (corp.surgery.padded).
    """

    name: str
    v: Rows
    heads: int
    down: str
    attention: str
    build: Any
    kv_heads: int | None = None
    mask: Mask | None = None
    padded: bool = False
    batch_first: ClassVar[bool] = True
    kind: ClassVar[str] = "vo"

    @property
    def width(self) -> int:
        """Value dimensions per head."""
        return self.v.width // self.groups

    @property
    def groups(self) -> int:
        """How many sets of dimensions are kept: one per value head."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def inputs(self) -> int:
        """Features that go into the linear `down`."""
        return self.heads * self.width


@dataclass(frozen=True)
class Rotary:
    """The first `dims` of every head's queries and keys are rotated, in pairs (j, j + dims/2), by their position.

    `argument` of the attention's own forward call holds (cos, sin), each (B, n, dims). None: rotated queries and keys
    are read where they reach scaled_dot_product_attention.
    """

    dims: int
    argument: str | None = "position_embeddings"


@dataclass(frozen=True)
class AttentionSite:
    """Queries and keys of all heads, head after head in `q` and `k`; `name` is the module that is replaced.

    `build(dense_module, q, k, v)` makes the narrower attention module around new projections, those of the dense one
    where they are None: one class of surgery/attention.py per calling convention.
    `causal`: a query sees the keys up to its own position only; None where every call says so itself. Queries and
    keys have masks of their own: in cross-attention they are tokens of different sequences. `window`: it sees so many
    of them at the most. Groups of query heads may share a key head (`kv_heads` of them); they keep the same dimensions.
    `scale` is what logits are multiplied by before the softmax; rotary sites need it.
    """

    name: str
    q: Rows
    k: Rows
    heads: int
    build: Any
    q_mask: Mask | None = None
    k_mask: Mask | None = None
    causal: bool | None = False
    window: int | None = None
    kv_heads: int | None = None
    rotary: Rotary | None = None
    scale: float = 1.0
    padded: bool = False
    kind: ClassVar[str] = "attn"

    @property
    def attention(self) -> str:
        """The module that is replaced."""
        return self.name

    @property
    def width(self) -> int:
        """Q/K dimensions per head."""
        return self.q.width // self.heads

    @property
    def groups(self) -> int:
        """How many sets of dimensions are kept: one per key head."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def rotary_dims(self) -> int:
        """Dimensions per head that are turned by their position."""
        return self.rotary.dims if self.rotary else 0

    @property
    def plain_width(self) -> int:
        """Dimensions per head that are not; they come after the others."""
        return self.width - self.rotary_dims

    @property
    def plain_name(self) -> str:
        """What the sums of those dimensions are called, beside the sums of the rotated ones."""
        return f"{self.name}.unrotated" if self.rotary else self.name


@dataclass(frozen=True)
class OutputHead:
    """The linear `name` that turns hidden states (`inputs`) into logits (`outputs`), possibly the tied embedding."""

    name: str
    inputs: int
    outputs: int
    tied: bool = False
    mask: Mask | None = None
    batch_first: ClassVar[bool] = True

    @property
    def down(self) -> str:
        return self.name


LinearSite: TypeAlias = MLPSite | ValueSite  # pruned at the input of a linear layer
Site: TypeAlias = MLPSite | AttentionSite | ValueSite


def module_of(site: Site) -> str:
    """What is narrowed as a whole: an MLP, or an attention, of which there may be two sites."""
    return site.name if isinstance(site, MLPSite) else site.attention


def layers_of(site: Site) -> list[str]:
    """The modules whose parameters pruning the site narrows."""
    if isinstance(site, AttentionSite):
        return list(dict.fromkeys((site.q.module, site.k.module)))
    makers = site.up if isinstance(site, MLPSite) else (site.v,)
    return list(dict.fromkeys((*(rows.module for rows in makers), site.down)))


def heads_of(site: Site) -> int | None:
    """How many heads keep dimensions of their own; None where there are none."""
    return None if isinstance(site, MLPSite) else site.groups


@dataclass(frozen=True)
class Refusal:
    """A place that looks prunable but is not understood: asking for it is an error, never a silent skip."""

    name: str
    kind: str
    reason: str


Finding: TypeAlias = Site | Refusal


@dataclass(frozen=True)
class Layer:
    """A layer of the model with what becomes of it: state "pruned", "refused" or "outside", and why not pruned."""

    name: str
    params: int
    state: str
    reason: str = ""


class Sites(Tabular):
    """What was found in a model: iterate over it for the sites, `refused` holds the rest.

    `layers` accounts for every layer of the model; `proven` are the names of sites that were tried out on it.
    """

    def __init__(
        self,
        found: list[Site],
        refused: list[Refusal] | None = None,
        adapter: str = "",
        output: OutputHead | None = None,
        layers: tuple[Layer, ...] = (),
        proven: frozenset[str] = frozenset(),
    ) -> None:
        self.refused = tuple(refused or ())
        self.output = output
        self.adapter = adapter
        self.layers = layers
        self.proven = proven
        self._by_name: dict[str, Site] = {}
        for site in found:
            if site.name in self._by_name:
                raise ModelError(f"the adapter {adapter!r} names two sites {site.name!r}; site names must be unique")
            self._by_name[site.name] = site

    def __iter__(self) -> Iterator[Site]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]

    def refusing(self, sites: Iterable[Site], reason: str) -> Sites:
        """Without these sites, which are refused for this reason."""
        lost = {site.name: Refusal(site.name, site.kind, reason) for site in sites}
        kept = [site for site in self if site.name not in lost]
        refused = [*self.refused, *lost.values()]
        return Sites(kept, refused, self.adapter, self.output, self.layers, self.proven - set(lost))

    def get(self, name: str) -> Site | None:
        return self._by_name.get(name)

    @property
    def mlp(self) -> list[MLPSite]:
        return [site for site in self if isinstance(site, MLPSite)]

    @property
    def attention(self) -> list[AttentionSite]:
        return [site for site in self if isinstance(site, AttentionSite)]

    @property
    def values(self) -> list[ValueSite]:
        return [site for site in self if isinstance(site, ValueSite)]

    def coverage(self) -> dict[str, float]:
        """The shares of the model's parameters in layers that are pruned, refused, and outside of both."""
        total = sum(layer.params for layer in self.layers) or 1
        return {
            state: sum(layer.params for layer in self.layers if layer.state == state) / total
            for state in ("pruned", "refused", "outside")
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "coverage": self.coverage(),
            "sites": [
                {"name": s.name, "kind": s.kind, "width": s.width, "heads": getattr(s, "heads", None)} for s in self
            ],
            "refused": [{"name": r.name, "kind": r.kind, "reason": r.reason} for r in self.refused],
        }

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """One row per site, those that cannot be pruned last."""
        rows: list[tuple[str, ...]] = []
        for site in self:
            heads = f"{count} heads x " if (count := heads_of(site)) else ""
            rows.append((site.name, site.kind, f"{heads}{site.width}"))
        rows += [(r.name, r.kind, f"cannot be pruned: {r.reason}") for r in self.refused]
        return f"{len(self)} sites ({self.adapter})", ("site", "kind", "width"), rows


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and their names: statistics and plans of other weights are refused by it."""
    return fingerprint_of(model.named_parameters())


def fingerprint_of(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of a model with these parameters, in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters:
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if parameter.device.type != "meta":
            try:
                raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(raw.numpy().data)
            except (RuntimeError, TypeError) as error:
                raise ModelError(
                    f"the weight {name} cannot be read here ({error}); gather a sharded model (FSDP), or load it "
                    "without quantisation, before pruning"
                ) from error
    return digest.hexdigest()


@contextmanager
def at_site(site: Site) -> Iterator[None]:
    """The core states the fact, this border adds where: once, for every error that comes through."""
    try:
        yield
    except CorpError as error:
        error.args = (f"{site.name} ({site.kind}, width {site.width}): {error}",)
        raise


class Projection(NamedTuple):
    """Weight (out, in) and bias (out,) of a linear map."""

    weight: Tensor
    bias: Tensor | None


def site_devices(model: nn.Module, sites: Sites) -> dict[str, torch.device]:
    """The device of every site's weights, by the names that its statistics have."""
    found: dict[str, torch.device] = {}
    for site in sites:
        if isinstance(site, AttentionSite):
            found[site.name] = found[site.plain_name] = rows_of(model, site.q).weight.device
        else:
            found[site.name] = projection_at(model, site.down).weight.device
    if sites.output is not None:
        found[sites.output.name] = projection_at(model, sites.output.name).weight.device
    return found


def is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer that keeps its weight as (in, out) and always has a bias."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def projection_at(model: nn.Module, name: str) -> Projection:
    """Weight (out, in) and bias of the linear layer called `name`: the one place that knows how they are kept."""
    return projection_of(model.get_submodule(name))


def projection_of(module: Any) -> Projection:
    weight = module.weight.detach()
    bias = None if module.bias is None else module.bias.detach()
    return Projection(weight.mT if is_transposed(module) else weight, bias)


def rows_of(model: nn.Module, rows: Rows) -> Projection:
    """The part of a linear map that `rows` points at."""
    return _cut(_at(model.get_submodule(rows.module), rows), rows)


def _at(module: nn.Module, rows: Rows) -> Projection:
    if rows.weight == "weight":
        return projection_of(module)
    bias = getattr(module, rows.bias)  # bare parameters of nn.MultiheadAttention
    return Projection(getattr(module, rows.weight).detach(), None if bias is None else bias.detach())


def _cut(whole: Projection, rows: Rows) -> Projection:
    return Projection(whole.weight[rows.index], None if whole.bias is None else whole.bias[rows.index])
