"""Models that accelerate has spread over devices are pruned whole, and stay spread; offloaded weights are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp import Recipe
from corp.errors import ModelError
from corp.surgery.dispatch import dispatched, require_present, require_weights, undispatched
from tests.helpers import rotary_models

HALF = Recipe(mlp=0.5, attn=0.5, vo=0.5, sequential=False)

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


def spread(model: Any, folder: Path, second: str) -> Any:
    """The model with its second layer on another device."""
    accelerate = pytest.importorskip("accelerate")
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places |= {f"model.layers.{i}": second if i == 1 else "cpu" for i in range(len(model.model.layers))}
    return accelerate.dispatch_model(
        model, {**places, "lm_head": "cpu"}, main_device="cpu", offload_dir=str(folder), force_hooks=True
    )


def test_a_dispatched_model_is_pruned_like_any_other(tmp_path: Path) -> None:
    data = rotary_models.batches()
    expected = corp.prune(rotary_models.build("llama"), data, HALF).model
    found = corp.prune(spread(rotary_models.build("llama"), tmp_path, "cpu"), data, HALF).model
    assert dispatched(found)
    weights = found.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.state_dict().items())
    with torch.no_grad():
        assert torch.equal(found(**data[0]).logits, expected(**data[0]).logits)


def test_offloaded_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"layers\.1.*is offloaded.*device_map"):
        corp.prune(spread(rotary_models.build("llama"), tmp_path, "disk"), rotary_models.batches(), HALF)


def test_models_without_values_are_refused() -> None:
    require_weights(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"1\.weight is on the meta device, and so are 1 more parameters"):
        require_weights(model)


def test_hooks_are_gone_within_and_back_afterwards(tmp_path: Path) -> None:
    model = spread(rotary_models.build("llama"), tmp_path, "cpu")
    hooks = dispatched(model)
    assert hooks
    require_present(model)
    with undispatched(model):
        assert not dispatched(model)
        assert not any("forward" in vars(module) for module in model.modules())
    assert dispatched(model) == hooks
