"""Which parts of a model are blocks: only those are pruned, not embeddings and heads."""

from __future__ import annotations

from collections.abc import Iterable

from corp.adapters.linears import in_block


def lone_blocks(attentions: Iterable[str]) -> tuple[str, ...]:
    """The prefixes of modules that contain an attention outside of any numbered block and none in such a block.

    Such a block is called once, or repeatedly with the same weights.
    """
    names = set(attentions)
    numbered = {name for name in names if in_block(f"{name}.x")}
    homes = {f"{home}." if (home := name.rpartition(".")[0]) else "" for name in names - numbered}
    return tuple(sorted(home for home in homes if not any(name.startswith(home) for name in numbered)))
