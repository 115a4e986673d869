"""The parts of packed and separate projections, by their letters, in every order and with shared keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from corp.surgery.hf_names import Names
from tests.helpers.seeds import seeded

HEADS, GROUPS, D = 4, 2, 5


def layer(rows: int, bias: bool) -> nn.Linear:
    made = nn.Linear(D, rows, bias=bias).double()
    made.weight.data = torch.randn(rows, D, generator=seeded(rows), dtype=torch.float64)
    return made


def names(letters: str, **more: object) -> Names:
    return Names((("packed", letters),), ("out",), "heads", None, "drop", **more)  # type: ignore[arg-type]


def parts_of(module: SimpleNamespace, found: Names, letters: str, x: Tensor) -> dict[str, Tensor]:
    parts = found.split(module, "packed", letters)
    return {letter: nn.functional.linear(x, *part) for letter, part in parts.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("letters", ["qkv", "vqk", "kv", "q", "v"])
@pytest.mark.parametrize("groups", [HEADS, GROUPS])
@pytest.mark.parametrize(("qk", "v"), [(3, 3), (2, 3)])
def test_parts_of_a_projection_are_its_rows_in_order(letters: str, groups: int, qk: int, v: int, bias: bool) -> None:
    heights = {"q": HEADS * qk, "k": groups * qk, "v": groups * v}
    packed = layer(sum(heights[one] for one in letters), bias)
    module = SimpleNamespace(packed=packed, heads=HEADS, groups=groups, head_dim=v)
    x = torch.randn(3, D, generator=seeded(1), dtype=torch.float64)
    known = names(letters, kv_heads=None if groups == HEADS else "groups")
    expected = dict(zip(letters, packed(x).split([heights[one] for one in letters], -1), strict=True))
    torch.testing.assert_close(parts_of(module, known, letters, x), expected)
    assert known.count_heads(module) == (HEADS, groups)


def test_a_narrowed_module_knows_the_width_of_its_values() -> None:
    module = SimpleNamespace(heads=HEADS, head_dim=8, v_dim=3)
    assert names("qkv").value_width(module) == 3
    assert names("qkv", head_dim="inner.width").value_width(SimpleNamespace(inner=SimpleNamespace(width=7))) == 7


@pytest.mark.parametrize("bias", [True, False])
def test_projections_that_go_head_by_head_are_sorted_by_letter(bias: bool) -> None:
    packed = layer(HEADS * 3 * 2, bias)
    module = SimpleNamespace(packed=packed, heads=HEADS, head_dim=2)
    x = torch.randn(3, D, generator=seeded(1), dtype=torch.float64)
    found = parts_of(module, names("qkv", by_head=True), "qkv", x)
    y = packed(x)
    for number, letter in enumerate("qkv"):
        one_by_one = [y[:, (3 * h + number) * 2 + j] for h in range(HEADS) for j in range(2)]
        torch.testing.assert_close(found[letter], torch.stack(one_by_one, 1))
