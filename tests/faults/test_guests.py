"""Models are guests: they leave as they came; and those that cannot be cut truly are turned away with the reason."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe, Result
from corp.errors import CorpWarning
from tests.helpers.models import build, images

HALF = Recipe.paper(mlp=0.5, attn=0.5)


def pruned(model: nn.Module, dtype: torch.dtype = torch.float64) -> Result:
    return corp.prune(model, images(3, 20, dtype), HALF)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def same(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def failing() -> Iterator[Tensor]:
    yield images()[0]
    raise RuntimeError("the data ends here")


def test_a_model_in_train_mode_is_calibrated_in_eval_mode_and_given_back() -> None:
    model, reference = build("vit"), build("vit")
    for module in (model, reference):
        for block in module.blocks:
            block.mlp.drop1 = nn.Dropout(0.5)  # in train mode it would change every sum
    model.train()
    model.blocks[1].eval()  # a frozen block, as trainers leave it
    before = modes(model)
    stats, expected = corp.calibrate(model, images()), corp.calibrate(reference, images())
    assert modes(model) == before
    assert torch.equal(
        stats.moments_of("blocks.0.mlp").total().cov(), expected.moments_of("blocks.0.mlp").total().cov()
    )
    with pytest.raises(RuntimeError, match="ends here"):
        corp.calibrate(model, failing())
    assert modes(model) == before
    result = corp.apply(model, stats, corp.plan(model, stats, HALF))
    assert modes(model) == before
    assert result.model.training
    assert not result.model.blocks[1].mlp.fc1.training


def test_random_states_are_left_as_they_were_found(tmp_path: Path) -> None:
    model, data = build("vit"), images()

    def states() -> tuple[Any, ...]:
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = states()
    result = corp.prune(model, data, HALF)
    assert states() == before
    with pytest.warns(CorpWarning, match="needs the dense model"):
        corp.save(result, tmp_path / "model")
    assert states() == before
    corp.load(tmp_path / "model", base=model)
    assert states() == before


def test_a_saved_timm_model_is_loaded_without_drawing_numbers(tmp_path: Path) -> None:
    import timm

    model = timm.create_model("test_vit", img_size=32, num_classes=2).eval()
    corp.save(
        corp.prune(model, [torch.randn(8, 3, 32, 32)], Recipe.paper(mlp=0.9, compensate="none")), tmp_path / "model"
    )
    before = torch.get_rng_state()
    corp.load(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_hooks_are_removed_when_the_data_fails() -> None:
    model = build("vit")
    seen: list[int] = []
    mine = model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(RuntimeError, match="ends here"):
        corp.calibrate(model, failing())
    assert hooks(model) == 1  # the guest's own
    assert seen
    mine.remove()
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_dense_model_is_not_changed() -> None:
    model, untouched = build("vit"), build("vit")
    result = pruned(model)
    assert same(model, untouched)
    assert hooks(model) == hooks(result.model) == 0
    assert all(p.requires_grad for p in model.parameters())


class LowRank(nn.Module):
    """As adapters for fine-tuning wrap a layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Subclass(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _wrapped(model: Any) -> None:
    model.blocks[0].mlp.fc1 = LowRank(model.blocks[0].mlp.fc1)


def _subclassed(model: Any) -> None:
    old = model.blocks[0].mlp.fc1
    model.blocks[0].mlp.fc1 = Subclass(old.in_features, old.out_features, dtype=old.weight.dtype)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.blocks[0].mlp.fc1),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(m.blocks[0].attn.qkv),
    "a low-rank adapter": _wrapped,
    "a subclass": _subclassed,
}


@pytest.mark.parametrize("case", REFUSED)
def test_layers_that_are_more_than_a_linear_keep_their_width_and_the_reason_is_told(case: str) -> None:
    model = build("vit")
    REFUSED[case](model)
    kind = "attn" if case == "spectral norm" else "mlp"
    with pytest.warns(CorpWarning, match=r"1 of 2 .*blocks\.0\.\w+ .*not a plain linear layer"):
        result = pruned(model)
    told = [site.name for site in result.plan.sites if site.kind == kind]
    assert told == [f"blocks.1.{kind}"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_made_by_hooks_and_hooks_that_change_outputs_keep_their_width() -> None:
    model: Any = build("vit")
    nn.utils.weight_norm(model.blocks[0].mlp.fc1)
    with pytest.warns(CorpWarning, match=r"blocks\.0\.mlp \(mlp\): fc1 has forward hooks"):
        assert "blocks.0.mlp" not in {site.name for site in pruned(model).plan.sites}
    model = build("vit")
    handle = model.blocks[1].attn.qkv.register_forward_hook(lambda _m, _a, out: 2 * out)
    with pytest.warns(CorpWarning, match=r"blocks\.1\.attn \(attn\): qkv has forward hooks.*remove them"):
        assert "blocks.1.attn" not in {site.name for site in pruned(model).plan.sites}
    handle.remove()
    assert "blocks.1.attn" in {site.name for site in pruned(model).plan.sites}


def test_a_layer_used_by_two_sites_is_refused_for_both() -> None:
    model: Any = build("vit")
    model.blocks[1].mlp.fc2 = model.blocks[0].mlp.fc2
    refused = {refusal.name: refusal.reason for refusal in corp.find_sites(model).refused}
    assert refused == {
        "blocks.0.mlp": "it shares a layer with blocks.1.mlp",
        "blocks.1.mlp": "it shares a layer with blocks.0.mlp",
    }


def test_a_compiled_wrapper_is_asked_for_the_model_inside() -> None:
    with pytest.raises(CorpError, match="give corp the model itself"):
        corp.find_sites(torch.compile(build("vit"), backend="eager"))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # torch warns of its own quantisation's future
def test_quantised_layers_are_refused_with_the_reason() -> None:
    model = torch.ao.quantization.quantize_dynamic(build("vit", torch.float32), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(CorpError, match=r"quantized.*not a plain linear layer"):
        pruned(model, torch.float32)


def test_a_gradient_checkpointed_model_gives_the_same() -> None:
    model = build("vit")
    model.set_grad_checkpointing(True)  # type: ignore[operator]
    assert same(pruned(model).model, pruned(build("vit")).model)


def test_a_compiled_model_is_run_as_it_was_written() -> None:
    compiled = 0

    def backend(graph: Any, _inputs: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return graph

    model = build("vit")
    model.compile(backend=backend)
    result = pruned(model)
    assert compiled == 0
    assert same(result.model, pruned(build("vit")).model)


def test_a_block_used_twice_is_cut_once_for_both_uses() -> None:
    model: Any = build("vit")
    model.blocks[1] = model.blocks[0]
    result = pruned(model)
    smaller: Any = result.model
    assert [site.name for site in result.plan.sites] == ["blocks.0.attn", "blocks.0.mlp"]
    assert smaller.blocks[1] is smaller.blocks[0]
    seen = corp.calibrate(model, images()).moments_of("blocks.0.mlp").total().seen
    assert seen == 2 * corp.calibrate(build("vit"), images()).moments_of("blocks.0.mlp").total().seen


def test_weights_shared_by_two_layers_are_cut_apart() -> None:
    model: Any = build("vit")
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    before = copy.deepcopy(model)
    result: Any = pruned(model).model
    assert result.blocks[1].mlp.fc1.weight is not result.blocks[0].mlp.fc1.weight
    assert same(model, before)


def test_cycles_leave_no_models_files_or_hooks_behind(tmp_path: Path) -> None:
    model, made = build("vit"), []
    open_files = []
    for _ in range(4):
        result = pruned(model)
        with pytest.warns(CorpWarning, match="needs the dense model"):
            corp.save(result, tmp_path / "model", overwrite=True)
        loaded = corp.load(tmp_path / "model", base=model)
        made += [weakref.ref(result.model), weakref.ref(loaded)]
        del result, loaded
        gc.collect()
        if Path("/proc/self/fd").is_dir():
            open_files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert [ref() for ref in made] == [None] * 8
    assert len(set(open_files[1:])) <= 1
    assert hooks(model) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
