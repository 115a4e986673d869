"""Sites as plain data: rows of linear layers, masks and rotations, and the kinds of prunable sites."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from corp.errors import CorpError


@dataclass(frozen=True)
class Rows:
    """Output features `start:stop` of the linear layer called `module`.

    `weight` and `bias` are its parameters' names, because nn.MultiheadAttention has a linear map as bare parameters.
    If heads are packed one by one (q, k, v of the first head, then of the second …), the features come in `runs`,
    each `period` after the one before. Rotary pairs are (j, j + pairs/2); if the layer has them as neighbours
    (2j, 2j + 1), `pairs` is the number of such dimensions among the `head` of every head, and `index` reorders them.
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
        """Whether they are bare parameters of nn.MultiheadAttention, which is never called as a layer."""
        return self.weight != "weight"

    @property
    def width(self) -> int:
        return self.runs * (self.stop - self.start)

    @property
    def index(self) -> slice | list[int]:
        """The index that selects them from the layer's output features."""
        return self.positions if self.period else slice(self.start, self.stop)

    @property
    def head_order(self) -> list[int] | None:
        """The order of the dimensions of one head, if they are reordered."""
        return _halves_first(self.head, self.head, self.pairs) if self.pairs else None

    @property
    def positions(self) -> list[int]:
        """The positions of the features."""
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

    True or 1 marks a real token or, with `marks_padding`, padding (torch.nn's convention). If that module gets only a
    derived mask, the first module `around` it that gets such a mask is used.
    """

    module: str
    argument: str
    marks_padding: bool = False
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rotary:
    """The first `dims` of every head's queries and keys are rotated, in pairs (j, j + dims/2), by their position.

    `argument` of the attention's own forward call holds (cos, sin), each (B, n, dims). None: rotated queries and keys
    are observed at scaled_dot_product_attention.
    """

    dims: int
    argument: str | None = "position_embeddings"


@dataclass(frozen=True)
class MLPSite:
    """Hidden channels: made by the rows `up` (two sets in a gated MLP), consumed by the linear layer `down`.

    `between` are modules between them with parameters per channel that do not mix channels (a depthwise convolution).
    Its tokens are (B, n, D), or (n, B, D) if not `batch_first`. An expert sees only the tokens that are routed to
    it; `experts` is the module that contains it and the other experts, which all keep one width.
    """

    name: str
    up: tuple[Rows, ...]
    down: str
    mask: Mask | None = None
    batch_first: bool = True
    experts: str | None = None
    between: tuple[str, ...] = ()
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
    """Values of all heads: made by the rows `v`, averaged by the attention, consumed by the linear layer `down`.

    `attention` is the module that is replaced, by `build` as for its queries and keys. Groups of query heads may share
    one of `kv_heads` value heads; `down` takes every query head's own average of it. `padded`: the attention keeps
    its own code and computes at the dense width (corp.surgery.padded).
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
class QKNorm:
    """The modules `q` and `k` divide each head x (d,) by its length: x (shift + weight) / sqrt(mean x^2 + eps).

    They come between the projections and the rotation. Their weights (d,) are shared by all heads.
    """

    q: str
    k: str
    eps: float
    shift: float = 0.0


@dataclass(frozen=True)
class AttentionSite:
    """Queries and keys of all heads, head after head in `q` and `k`; `name` is the module that is replaced.

    `build(dense_module, q, k, v)` makes the narrower attention module with new projections, or the dense ones for
    None: one class of surgery/attention.py per calling convention.
    `causal`: a query sees only keys up to its own position; None if each call decides. Queries and keys have separate
    masks, because in cross-attention they are tokens of different sequences. `window` is the largest number of keys
    that a query sees. Groups of query heads may share one of `kv_heads` key heads; they keep the same dimensions.
    `scale` is what logits are multiplied by before the softmax; rotary sites need it. `norm`: whole heads are
    normalised before they are rotated. At least `least` dimensions per head are kept. Projections return (B, n, C), or
    (n, B, C) if not `batch_first`.
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
    norm: QKNorm | None = None
    least: int = 0
    batch_first: bool = True
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

    def sharing(self, g: int) -> range:
        """The query heads that share key head `g`."""
        shared = self.heads // self.groups
        return range(g * shared, (g + 1) * shared)

    @property
    def rotary_dims(self) -> int:
        """Dimensions per head that are rotated by their position."""
        return self.rotary.dims if self.rotary else 0

    @property
    def plain_width(self) -> int:
        """Dimensions per head that are not rotated; they come after the others."""
        return self.width - self.rotary_dims

    @property
    def plain_name(self) -> str:
        """The name of the sums of those dimensions, which are separate from the sums of the rotated ones."""
        return f"{self.name}.unrotated" if self.rotary else self.name


@dataclass(frozen=True)
class OutputHead:
    """The linear layer `name` that maps hidden states (`inputs`) to logits (`outputs`), possibly the tied embedding."""

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
    """The module that is narrowed as a whole: an MLP, or an attention, which may have two sites."""
    return site.name if isinstance(site, MLPSite) else site.attention


def layers_of(site: Site) -> list[str]:
    """The modules whose parameters pruning the site narrows."""
    if isinstance(site, AttentionSite):
        return list(dict.fromkeys((site.q.module, site.k.module)))
    if isinstance(site, MLPSite):
        return list(dict.fromkeys((*(rows.module for rows in site.up), *site.between, site.down)))
    return list(dict.fromkeys((site.v.module, site.down)))


def and_others(sites: Sequence[Any]) -> str:
    """The name of the first site, and how many others there are."""
    others = f" and {len(sites) - 1} other sites" if len(sites) > 1 else ""
    return f"{sites[0].name}{others}"


def heads_of(site: Site) -> int | None:
    """How many heads keep separate dimensions; None if there are no heads."""
    return None if isinstance(site, MLPSite) else site.groups


@contextmanager
def at_site(site: Site) -> Iterator[None]:
    """Add the site's name to every error raised within this context, once; the core states only the fact."""
    try:
        yield
    except CorpError as error:
        error.args = (f"{site.name} ({site.kind}, width {site.width}): {error}",)
        raise
