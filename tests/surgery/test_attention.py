"""Attention of unequal widths against plain products, for every mask, length and kind of module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.layers import AttentionPoolLatent
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from corp.sites import AttentionSite, Projection, Rotary, Rows, ValueSite
from corp.surgery import attention
from corp.surgery.attention import (
    LatentPool,
    PackedAttention,
    attend,
    attend_openly,
    equal_widths,
    narrow_queries,
    narrow_values,
    true_widths,
)
from tests.helpers.seeds import seed_all, seeded


def random(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(number), dtype=torch.float64)


def by_hand(q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor | None, bias: Tensor | None) -> Tensor:
    """Attention of one query after the other."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    for b, h, m in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        logits = scale * k[b, h] @ q[b, h, m]
        if bias is not None:
            logits = logits + bias.expand(*q.shape[:3], k.shape[2])[b, h, m]
        weights = logits.exp()
        if hidden is not None:
            weights = weights * ~hidden.expand(*q.shape[:3], k.shape[2])[b, h, m]
        out[b, h, m] = weights @ v[b, h] / weights.sum()
    return out


@pytest.mark.parametrize("tokens", [3, 70], ids=["short", "long"])
@pytest.mark.parametrize(("narrow", "wide"), [(2, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "bias"])
def test_attention_of_any_widths_is_that_of_plain_products(tokens: int, narrow: int, wide: int, kind: str) -> None:
    q, k = (random(2, 2, tokens, narrow, number=i) for i in (0, 1))
    v, bias = random(2, 2, tokens, wide, number=2), random(2, 1, 1, tokens, number=3)
    hidden = torch.ones(tokens, tokens).triu(1).bool() if kind == "causal" else None
    hidden = (bias > 0.5) & (torch.arange(tokens) > 0) if kind == "boolean" else hidden  # every query sees a key
    mask = {"boolean": None if hidden is None else ~hidden, "bias": bias}.get(kind)
    expected = by_hand(q, k, v, 0.3, hidden, bias if kind == "bias" else None)
    torch.testing.assert_close(attend(q, k, v, scale=0.3, mask=mask, causal=kind == "causal"), expected)
    if kind in ("none", "bias"):
        found, weights = attend_openly(q, k, v, scale=0.3, mask=mask, drop=0.0)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(weights @ v, expected)


def test_dropped_weights_are_zero_and_the_others_grow() -> None:
    seed_all(0)
    q, k, v = (random(1, 1, 40, 3, number=i) for i in range(3))
    _, whole = attend_openly(q, k, v, scale=0.3, mask=None, drop=0.0)
    y, weights = attend_openly(q, k, v, scale=0.3, mask=None, drop=0.25)
    lost = weights == 0
    assert 0.15 < float(lost.double().mean()) < 0.35
    torch.testing.assert_close(weights[~lost], whole[~lost] / 0.75)
    torch.testing.assert_close(y, weights @ v)
    narrow = attend(q, k, v[..., :2], scale=0.3, drop=0.25)
    assert not torch.allclose(narrow, whole @ v[..., :2])


@pytest.mark.parametrize(("tokens", "padded"), [((64, 64), False), ((64, 65), True), ((1, 4096), False)])
def test_long_sequences_of_unequal_widths_are_padded(
    tokens: tuple[int, int], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    fused = attention.F.scaled_dot_product_attention

    def watched(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        widths.append(q.shape[-1])
        return fused(q, *args, **kwargs)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", watched)
    q, k, v = random(1, 1, tokens[0], 2), random(1, 1, tokens[1], 2), random(1, 1, tokens[1], 4)
    attend(q, k, v, scale=1.0)
    assert widths == ([4] if padded else [])


def test_the_narrower_are_padded_with_zeros_unless_operations_are_counted() -> None:
    q, k, v = random(1, 1, 3, 2), random(1, 1, 3, 2, number=1), random(1, 1, 3, 4, number=2)
    wide = equal_widths(q, k, v)
    assert [x.shape[-1] for x in wide] == [4, 4, 4]
    assert torch.equal(wide[0][..., :2], q)
    assert not bool(wide[1][..., 2:].any())
    assert wide[2] is v
    assert [x.shape[-1] for x in equal_widths(v, v, q)] == [4, 4, 4]
    with true_widths():
        assert [x.shape[-1] for x in equal_widths(q, k, v)] == [2, 2, 4]
    assert [x.shape[-1] for x in equal_widths(q, k, v)] == [4, 4, 4]


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_attention_of_dense_parts_is_the_dense_one(bias: bool) -> None:
    seed_all(0)
    dense: Any = Attention(12, 3, qkv_bias=bias).double().eval()
    x, mask = random(2, 5, 12), random(2, 1, 5, 5, number=1)
    for made in (PackedAttention(dense), PackedAttention(PackedAttention(dense))):
        torch.testing.assert_close(made(x), dense(x))
        torch.testing.assert_close(made(x, attn_mask=mask), dense(x, attn_mask=mask))
        assert made.extra_repr() == "heads=3, qk_dim=4, v_dim=4"
        assert not made.training


def test_narrowed_parts_take_the_places_of_dense_ones() -> None:
    """Queries, keys and values without some dimensions, in the dense module as zeros."""
    seed_all(0)
    dense: Any = Attention(12, 3).double().eval()
    model, x = nn.ModuleDict({"attn": dense}), random(2, 5, 12)
    rows = [Rows("attn.qkv", 12 * i, 12 * (i + 1)) for i in range(3)]
    kept = [torch.tensor(some) for some in ([0, 2], [1, 3], [2, 3])]
    site = AttentionSite("attn", rows[0], rows[1], 3, None)
    parts = narrow_queries(model, site, kept, None)
    assert set(parts) == {"q", "k"}
    made = PackedAttention(dense, parts["q"], parts["k"])
    again = PackedAttention(made, v=Projection(dense.qkv.weight[24:], None))  # narrowed twice
    gone = [h * 4 + j for h, some in enumerate(kept) for j in range(4) if j not in some.tolist()]
    with torch.no_grad():
        dense.qkv.weight[gone] = 0
        dense.qkv.weight[[12 + i for i in gone]] = 0
    torch.testing.assert_close(made(x), dense(x))
    torch.testing.assert_close(again(x), dense(x))
    assert made.extra_repr() == again.extra_repr() == "heads=3, qk_dim=2, v_dim=4"
    assert made.scale == dense.scale


@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_every_head_are_kept_or_mapped(bias: bool) -> None:
    seed_all(0)
    model = nn.ModuleDict({name: nn.Linear(5, n, bias=bias).double() for name, n in (("q", 16), ("k", 8), ("v", 8))})
    kept = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    rows = Rows("q", 0, 16), Rows("k", 0, 8)
    site = AttentionSite("a", *rows, 4, None, kv_heads=2, rotary=Rotary(4))
    x = random(3, 5)
    parts = narrow_queries(model, site, kept, None)
    assert torch.equal(parts["kept"], torch.stack(kept))
    heads = {"q": [0, 0, 1, 1], "k": [0, 1]}
    for name, groups in heads.items():
        index = [h * 4 + j for h, g in enumerate(groups) for j in kept[g].tolist()]
        torch.testing.assert_close(nn.functional.linear(x, *parts[name]), model[name](x)[:, index])
    values = ValueSite("a.v", Rows("v", 0, 8), 4, "o", "a", None, kv_heads=2)
    maps = [random(2, 4, number=i) for i in (1, 2)]
    mapped = narrow_values(model, values, kept, maps)["v"]
    expected = torch.cat([model["v"](x)[:, 4 * g : 4 * g + 4] @ maps[g].mT for g in range(2)], 1)
    torch.testing.assert_close(nn.functional.linear(x, *mapped), expected)
    plain = narrow_values(model, values, kept, ())["v"]
    torch.testing.assert_close(nn.functional.linear(x, *plain), model["v"](x)[:, [0, 3, 5, 6]])


@pytest.mark.parametrize("pool", ["token", "avg", ""])
@pytest.mark.parametrize("embed", [True, False])
def test_a_pool_of_dense_parts_is_the_dense_one(pool: str, embed: bool) -> None:
    seed_all(0)
    size = {"feat_size": 5, "pos_embed": "abs"} if embed else {}
    dense: Any = AttentionPoolLatent(12, num_heads=3, latent_len=2, pool_type=pool, **size).double().eval()
    if embed:
        nn.init.normal_(dense.pos_embed)
    x = random(2, 5, 12)
    torch.testing.assert_close(LatentPool(dense)(x), dense(x))
    dense.mlp = None
    torch.testing.assert_close(LatentPool(dense)(x), dense(x))
