"""MLPs made of convolutions of one position, and what may stand between their layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

import corp
from corp import CorpError
from corp.testing import check_model
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
D, HIDDEN = 12, 40


class Feed(nn.Module):
    """Convolutions of one position with `between` on the way."""

    def __init__(self, conv: Any, between: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.fc1, self.between, self.act, self.fc2 = conv(D, HIDDEN, 1), between(), nn.GELU(), conv(HIDDEN, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.fc2(self.act(self.between(self.fc1(x))))
        return out


def normalised() -> nn.Module:
    norm = nn.BatchNorm2d(HIDDEN)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        assert isinstance(tensor, Tensor)
        tensor.uniform_(0.5, 2)
    return norm


def depthwise() -> nn.Module:
    return nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN)


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "nothing": nn.Identity,
    "a depthwise convolution": depthwise,
    "a batch norm": normalised,
    "both, one after the other": lambda: nn.Sequential(normalised(), nn.ReLU(inplace=True), depthwise()),
}


def maps(*sizes: int) -> Tensor:
    return torch.randn(6, D, *sizes, generator=seeded(1), dtype=torch.float64)


def stacked(conv: Any, between: Callable[[], nn.Module]) -> nn.Module:
    seed_all(3)
    return nn.Sequential(*(Feed(conv, between) for _ in range(2))).double().eval()


@pytest.mark.parametrize("between", BETWEEN)
def test_the_contract_holds(between: str) -> None:
    model = stacked(nn.Conv2d, BETWEEN[between])
    check_model(model, [maps(5, 6), maps(5, 6).flip(0)], show=None).require()
    sites = corp.find_sites(model)  # without a batch: loading has none
    assert [site.name for site in sites.mlp] == ["0", "1"]
    assert sites.proven == {"0", "1"}
    assert sites.coverage()["pruned"] == 1.0


def test_sequences_are_taken_like_maps() -> None:
    model = stacked(nn.Conv1d, nn.Identity)
    check_model(model, [maps(20), maps(20).flip(0)], show=None).require()


def test_budgets_count_what_stands_between() -> None:
    model = stacked(nn.Conv2d, BETWEEN["both, one after the other"])
    for kind in ("macs", "params"):
        result = corp.prune(model, [maps(5, 6)], corp.Recipe(**{f"target_{kind}": 0.6}))
        dense, pruned = getattr(result.report, kind)
        assert 0.57 < pruned / dense <= 0.6
    assert any("is a convolution; only linear layers are refitted" in note for note in result.plan.notes)


def test_segformer_keeps_the_filters_of_the_channels_that_it_keeps() -> None:
    sizes = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
    config = hf.SegformerConfig(**sizes, patch_sizes=[7, 3], strides=[4, 2], sr_ratios=[2, 1], mlp_ratios=[4, 4])
    seed_all(3)
    model = hf.SegformerModel(config).double().eval()
    batch = {"pixel_values": torch.randn(4, 3, 32, 32, generator=seeded(1), dtype=torch.float64)}
    check_model(model, [batch, {"pixel_values": batch["pixel_values"].flip(0)}], show=None).require()
    result = corp.prune(model, [batch], corp.Recipe(mlp=0.5, sequential=False))
    sites = corp.find_sites(model)
    assert sites.proven == {site.name for site in sites}  # its config names no size of images
    for site in sites.mlp:
        (name,) = site.between
        kept = next(plan for plan in result.plan.sites if plan.name == site.name).indices()[0]
        narrow: Any = result.model.get_submodule(name)
        assert torch.equal(narrow.weight, model.get_submodule(name).weight[kept])
        assert narrow.groups == len(kept) == site.width // 2


class Elsewhere(nn.Module):
    """A norm of the MLP's width, registered between its layers and used on something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Conv2d(D, HIDDEN, 1), nn.BatchNorm2d(HIDDEN), nn.Conv2d(HIDDEN, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        other = self.norm(x.repeat(1, 4, 1, 1)[:, :HIDDEN])
        out: Tensor = x + self.fc2(self.fc1(x).relu()) + other.mean()
        return out


class Weighed(nn.Module):
    """Channels weighed by their means, which only looks like an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(D, 3, 1), nn.Conv2d(3, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return x * weights


def test_what_does_not_treat_channels_one_by_one_is_refused() -> None:
    groups = stacked(nn.Conv2d, lambda: nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1, groups=4))
    for model, reason in (
        (groups, "between has parameters of its own for every hidden channel"),
        (stacked(nn.Conv2d, lambda: nn.LayerNorm([HIDDEN, 5, 6])), "between has parameters"),
        (stacked(nn.Conv2d, lambda: nn.PReLU(HIDDEN)), "between has parameters"),
        (nn.Sequential(Elsewhere(), Elsewhere()).double().eval(), "tried out on the model"),
    ):
        sites = corp.find_sites(model, maps(5, 6))
        assert not len(sites)
        assert sites.refused[0].reason.startswith(reason)


def test_a_bottleneck_of_convolutions_is_no_mlp() -> None:
    model = nn.Sequential(Weighed(), Feed(nn.Conv2d, nn.Identity)).double().eval()
    sites = corp.find_sites(model, maps(5, 6))
    assert [site.name for site in sites] == ["1"]
    assert not sites.refused


def test_a_model_without_patches_is_written_for_its_own_library(tmp_path: Path) -> None:
    """Removed channels of batch norms are zeros too; channels and size of images come from the model."""
    seed_all(3)
    model = timm.create_model("mobilenetv2_035", in_chans=1, num_classes=3).eval()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        assert norm.running_mean is not None
        norm.running_mean.uniform_(-1, 1)
    images = torch.randn(4, 1, 64, 64, generator=seeded(1))
    assert corp.find_sites(model).proven
    result = corp.prune(model, [images], corp.Recipe(mlp=0.5, sequential=False))
    with pytest.raises(CorpError, match="has no mlp_ratio of one width"):
        corp.save(result, tmp_path / "standard", profile="standard")
    corp.save(result, tmp_path / "compat", profile="compat")
    plain = timm.create_model(f"local-dir:{tmp_path / 'compat'}", pretrained=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(images), result.model(images), rtol=1e-4, atol=1e-5)
