"""The names of an attention's parts in transformers' families, and what the parts contain."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from corp.sites import Projection, projection_of
from corp.surgery.linear import unfuse


@dataclass(frozen=True)
class Names:
    """The names of an attention's parts in one family.

    `parts` maps each input projection to its outputs, in order: ("c_attn", "qkv") is a packed one. `out` are the
    modules that the heads' output goes through, none if the output projection is not inside the attention. `scale` is
    None if it is head_dim^-1/2 and has no name. Names may have dots. `kv_heads`: query heads share key and value
    heads. `by_head`: a packed projection holds q, k and v of one head after the other. `extras` are further arguments
    of the attention function, and where they are found. `norms` are those of query and key heads, if they have any.
    """

    parts: tuple[tuple[str, str], ...]
    out: tuple[str, ...]
    heads: str
    scale: str | None
    drop: str
    head_dim: str = "head_dim"
    kv_heads: str | None = None
    by_head: bool = False
    extras: tuple[tuple[str, str], ...] = ()
    norms: tuple[str, ...] = ()

    def count_heads(self, module: Any) -> tuple[int, int]:
        """The number of query heads, and of key and value heads."""
        heads: int = attrgetter(self.heads)(module)
        return heads, heads if self.kv_heads is None else attrgetter(self.kv_heads)(module)

    def value_width(self, module: Any) -> int:
        """The width of one value head, whether narrowed or not."""
        width: int = getattr(module, "v_dim", None) or attrgetter(self.head_dim)(module)
        return width

    def split(self, module: Any, name: str, letters: str) -> dict[str, Projection]:
        """The parts of a module's projection `name`, by letter."""
        whole, (heads, kv_heads) = projection_of(getattr(module, name)), self.count_heads(module)
        counts = {"q": heads, "k": kv_heads, "v": kv_heads}
        values = kv_heads * self.value_width(module) if "v" in letters else 0
        others = [counts[one] for one in letters if one != "v"]
        width = (len(whole.weight) - values) // sum(others) if others else 0  # of a query or key head
        rows = [values if one == "v" else counts[one] * width for one in letters]
        if self.by_head:
            whole = _head_last(whole, heads)
        return dict(zip(letters, unfuse(whole, rows), strict=True))


def _head_last(whole: Projection, heads: int) -> Projection:
    """Reorder rows from q, k, v of one head after the other to all of q, all of k, all of v, of equal widths."""
    weight = whole.weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    bias = None if whole.bias is None else whole.bias.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten()
    return Projection(weight, bias)
