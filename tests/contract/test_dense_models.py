"""Whole models that predict maps: pruning takes the backbone inside them and leaves neck and head alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import corp
from corp.evaluate.dense import MapScore
from corp.evaluate.heads import OwnMaps, task_of
from corp.evaluate.run import Contender, side_by_side
from tests.helpers.seeds import seed_all, seeded

VIT = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 28, "patch_size": 7}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
NECK = {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}


def dinov2(*, maps: bool) -> hf.Dinov2Config:
    return hf.Dinov2Config(**VIT, mlp_ratio=2, out_features=STAGES, apply_layernorm=True, reshape_hidden_states=maps)


def depth_anything() -> nn.Module:
    sizes = {"reassemble_hidden_size": 24, "patch_size": 7, "head_hidden_size": 4}
    config = hf.DepthAnythingConfig(backbone_config=dinov2(maps=False), **sizes, **NECK)
    return hf.DepthAnythingForDepthEstimation(config)


def dpt_on_dinov2() -> nn.Module:
    factors = {"reassemble_factors": [4, 2, 1, 0.5]}
    config = hf.DPTConfig(backbone_config=dinov2(maps=False), readout_type="ignore", hidden_size=24, **factors, **NECK)
    return hf.DPTForDepthEstimation(config)


def upernet() -> nn.Module:
    config = hf.UperNetConfig(
        backbone_config=dinov2(maps=True), hidden_size=8, pool_scales=[1, 2], num_labels=3, use_auxiliary_head=False
    )
    return hf.UperNetForSemanticSegmentation(config)


def dpt() -> nn.Module:
    config = hf.DPTConfig(**VIT, intermediate_size=48, is_hybrid=False, backbone_out_indices=[0, 1, 2, 3], **NECK)
    return hf.DPTForDepthEstimation(config)


def beit() -> nn.Module:
    sizes = {"intermediate_size": 48, "out_indices": [0, 1, 2, 3], "num_labels": 3, "use_auxiliary_head": False}
    return hf.BeitForSemanticSegmentation(hf.BeitConfig(**VIT, **sizes))


UNKNOWN = pytest.mark.xfail(strict=True, raises=AssertionError, reason="not all of its MLPs and attentions are found")
MODELS = [
    depth_anything,
    pytest.param(dpt_on_dinov2, marks=pytest.mark.slow),
    upernet,
    pytest.param(dpt, marks=UNKNOWN),
    beit,
]


def built(make: Callable[[], nn.Module]) -> nn.Module:
    seed_all(0)
    model = make().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = seeded(1)
    return [{"pixel_values": torch.randn(20, 3, 28, 28, generator=generator)} for _ in range(count)]


@pytest.mark.parametrize("make", MODELS)
def test_the_backbone_is_pruned_and_the_head_is_left_alone(make: Callable[[], nn.Module]) -> None:
    dense, data = built(make), batches()
    sites = corp.find_sites(dense)
    assert len(sites.mlp) == len(sites.attention) == 4
    pruned = corp.prune(dense, data, corp.Recipe(mlp=0.5, attn=0.5)).model
    layers = {name for site in sites for name in (site.name,)}
    for name, parameter in dense.named_parameters():
        inside = any(name.startswith(f"{site.rsplit('.o_proj', 1)[0]}.") for site in layers)
        assert inside or torch.equal(parameter, pruned.get_parameter(name)), name
    bare = corp.prune(dense, data, corp.Recipe(mlp=0.5, attn=0.5, compensate="none")).model
    score, worse = MapScore(str(task_of(dense))), MapScore(str(task_of(dense)))
    maps = [batch["pixel_values"] for batch in batches(1)]
    side_by_side(OwnMaps(dense), [Contender(OwnMaps(pruned), score), Contender(OwnMaps(bare), worse)], maps)
    assert score.likeness is not None
    assert worse.likeness is not None
    name = "rmse" if task_of(dense) == "depth" else "pixel_accuracy"
    kept, lost = (one.estimates()[name].value for one in (score.likeness, worse.likeness))
    assert kept < lost if name == "rmse" else kept > lost


@pytest.mark.parametrize("make", [depth_anything, upernet])
def test_a_pruned_whole_model_comes_back_from_its_folder(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    result = corp.prune(built(make), batches(), corp.Recipe(mlp=0.5))
    corp.save(result, tmp_path / "model")
    loaded, batch = corp.load(tmp_path / "model"), batches(1)[0]["pixel_values"]
    with torch.no_grad():
        torch.testing.assert_close(OwnMaps(loaded)(batch), OwnMaps(result.model)(batch))


def test_segformer_is_taken_by_name_or_refused() -> None:
    config = hf.SegformerConfig(
        num_encoder_blocks=1, depths=[1], sr_ratios=[1], hidden_sizes=[8], patch_sizes=[3], strides=[2],
        num_attention_heads=[1], mlp_ratios=[2], decoder_hidden_size=8, num_labels=3,
    )  # fmt: skip
    sites = corp.find_sites(hf.SegformerForSemanticSegmentation(config))
    assert len(sites) + len(sites.refused) > 0
