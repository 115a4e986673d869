"""Calls of blocks as records: which argument is the hidden state, what may be called again, and when streams agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.errors import PlanError
from corp.sites import MLPSite, Rows
from corp.surgery.refit.replay import Call, close, drive, meeting, record, record_calls, watching
from tests.helpers.seeds import seed_all, seeded

SITES = [MLPSite(f"blocks.{i}.mlp", (Rows(f"blocks.{i}.up", 0, 6),), f"blocks.{i}.down") for i in range(2)]
NAMES = ["blocks.0", "blocks.1"]


class Block(nn.Module):
    """A block that adds to its hidden state in place, scaled by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 6), nn.Linear(6, 4), nn.LayerNorm(4)

    def forward(self, scale: Any, *, x: Tensor) -> Any:
        y = self.down(self.up(x).relu())
        x += scale * y
        y += 100
        return self.norm(x), "weights"


class Model(nn.Module):
    def __init__(self, between: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList([Block(), Block()]), between

    def forward(self, x: Tensor, scale: Any = 0.5) -> Tensor:
        x = x.clone()
        for block in self.blocks:
            x = block(scale, x=x)[0]
            x = x + self.between if self.between else x
        return x


def build(between: float = 0.0) -> Model:
    seed_all(0)
    return Model(between).double().eval()


def hidden() -> Tensor:
    return torch.randn(2, 3, 4, generator=seeded(1), dtype=torch.float64)


def test_a_call_has_its_hidden_state_replaced() -> None:
    x, y = hidden(), hidden() + 1
    by_place, by_name = Call((1, x, 2), {"a": 3}, 1), Call((1,), {"x": x, "a": 3}, "x")
    assert by_place.hidden is by_name.hidden is x
    assert by_place.having(y).args[1] is y
    assert by_place.having(y).args[::2] == (1, 2)
    assert by_name.having(y).kwargs["x"] is y
    assert by_name.having(None).kwargs == {"x": None, "a": 3}
    assert by_name.kwargs["x"] is x


def test_blocks_run_again_as_the_model_ran_them() -> None:
    model, x = build(), hidden()
    ends: dict[str, Tensor | None] = {"blocks.1": None}
    passage = record_calls(model, NAMES, lambda: model(x), ends=ends)
    assert list(passage.calls) == ["blocks.0", "blocks.1"]
    assert list(passage.starts) == ["blocks.0"]
    assert torch.equal(passage.starts["blocks.0"], x)
    assert passage.calls["blocks.0"].kwargs == {"x": None}  # hidden states are not kept alive
    before = x.clone()
    stream = drive(model, "blocks.0", passage.calls["blocks.0"], x)
    assert torch.equal(x, before)
    stream = drive(model, "blocks.1", passage.calls["blocks.1"], stream)
    torch.testing.assert_close(stream, model(x))
    assert ends["blocks.1"] is not None
    torch.testing.assert_close(ends["blocks.1"], model(x))
    assert passage.last is None


def test_other_hidden_states_start_the_chains() -> None:
    model, x = build(between=1.0), hidden()
    ends: dict[str, Tensor | None] = {"blocks.0": None}
    passage = record_calls(model, NAMES, lambda: model(x), dict.fromkeys(NAMES, lambda stream: 2 * stream), ends)
    assert list(passage.starts) == ["blocks.0", "blocks.1"]  # something is added between them
    assert torch.equal(passage.starts["blocks.0"], x)
    assert ends["blocks.0"] is not None
    torch.testing.assert_close(ends["blocks.0"], drive(model, "blocks.0", passage.calls["blocks.0"], 2 * x))


@pytest.mark.parametrize("scale", [object(), [1.0, {"a": (object(),)}]])
def test_arguments_that_may_change_are_refused(scale: Any) -> None:
    model = build()
    with pytest.raises(PlanError, match=r"blocks\.0 takes a object, which every call may change"):
        record(model, SITES, lambda: model.blocks[0](scale, x=hidden()))


def test_blocks_that_run_twice_or_on_nothing_are_refused() -> None:
    model = build()
    with pytest.raises(PlanError, match=r"blocks\.0 runs more than once"):
        record(model, SITES, lambda: (model(hidden()), model(hidden())))
    with pytest.raises(PlanError, match=r"blocks\.0 takes no hidden state"):
        record(model, SITES, lambda: model.blocks[0](1, x=torch.ones(2, 3, 4, dtype=torch.long)))


def test_outputs_are_copied_before_blocks_change_them_and_a_block_can_end_early() -> None:
    model, x = build(), hidden()
    inner = model.blocks[0].up(x).relu()  # type: ignore[operator,union-attr]
    call = Call((0.5,), {"x": None}, "x")
    with watching(model, SITES[:1], inputs="blocks.0.mlp") as seen:
        output = drive(model, "blocks.0", call, x)
    found = seen["blocks.0.mlp"]
    assert found.x is not None
    torch.testing.assert_close(found.x, inner)
    torch.testing.assert_close(found.y, model.blocks[0].down(inner))  # type: ignore[operator,union-attr]
    assert not torch.equal(output, x)
    with watching(model, SITES[:1]) as unasked:
        drive(model, "blocks.0", call, x)
    assert unasked["blocks.0.mlp"].x is None
    with watching(model, SITES[:1], inputs="blocks.0.mlp", stop=True), meeting(model, ["blocks.0.norm"]) as met:
        assert torch.equal(drive(model, "blocks.0", call, x), x)
    assert met == {}
    with meeting(model, ["blocks.0.norm"]) as met:
        drive(model, "blocks.0", call, x)
    torch.testing.assert_close(met["blocks.0.norm"], x + 0.5 * found.y)
    with meeting(model, ["blocks.0.norm"], stop=True):
        assert torch.equal(drive(model, "blocks.0", call, x), x)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("dtype", "small", "large"), [(torch.float64, 1e-9, 2e-9), (torch.float32, 3e-5, 4e-5),
                                                      (torch.bfloat16, 0.0, 0.02)])  # fmt: skip
def test_streams_are_close_up_to_a_tenth_of_the_root_of_the_precision(
    dtype: torch.dtype, small: float, large: float
) -> None:
    x = torch.full((100,), 2.0, dtype=dtype)
    assert close(x, x * (1 + small))
    assert not close(x, x * (1 + large))
    assert not close(x, x[:50])


def test_rounding_grows_with_the_root_of_the_blocks() -> None:
    x = torch.full((100,), 1.0, dtype=torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    one_step = x * (1 + 8 * eps)
    assert not close(x, one_step)
    assert not close(x, one_step, 16)
    assert close(x, one_step, 18)
