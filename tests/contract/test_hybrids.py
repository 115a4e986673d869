"""Models in which only some layers are attentions, or are given masks as attentions are, or differ in their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
import transformers as hf
from torch import nn

import corp
from corp.testing import check_model
from tests.helpers import handmade
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore")  # few samples, and transformers' own about kernels


def bamba() -> nn.Module:
    """One state-space layer and one attention."""
    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1]}
    states = {"n_heads": 8, "d_head": 8, "n_groups": 1, "d_state": 8, "d_conv": 4, "expand": 2, "chunk_size": 8}
    seed_all(3)
    config = hf.BambaConfig(**sizes, **heads, **{f"mamba_{name}": value for name, value in states.items()})
    return hf.BambaForCausalLM(config).eval()


def mask2former() -> nn.Module:
    """Its pixel decoder's layers are given a mask of zeros: nothing is padding."""
    stages: dict[str, Any] = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4, "image_size": 64}
    backbone = hf.SwinConfig(embed_dim=8, out_features=[f"stage{i}" for i in (1, 2, 3, 4)], **stages)
    sizes = {"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "dim_feedforward": 64, "num_queries": 5}
    layers = {"encoder_layers": 1, "encoder_feedforward_dim": 64, "decoder_layers": 2, "num_attention_heads": 4}
    seed_all(3)
    return hf.Mask2FormerModel(hf.Mask2FormerConfig(backbone_config=backbone, **sizes, **layers)).eval()


def test_blocks_with_the_same_weights_are_refused_by_name() -> None:
    """Cut apart, every one of them would need weights of its own."""
    seed_all(3)
    model: Any = nn.Sequential(*(handmade.Annotated() for _ in range(3))).eval()
    for name in ("up", "down"):
        getattr(model[1].feed_forward, name).weight = getattr(model[0].feed_forward, name).weight
    sites = corp.find_sites(model, torch.randn(4, 9, handmade.D, generator=seeded(1)))
    assert [site.name for site in sites.mlp] == ["2.feed_forward"]
    assert {r.name: r.reason for r in sites.refused} == {
        f"{one}.feed_forward": f"it shares all its weights with {other}.feed_forward" for one, other in ((0, 1), (1, 0))
    }


def test_a_state_space_layer_is_no_attention() -> None:
    batch = {"input_ids": torch.randint(3, 50, (4, 10), generator=seeded(1))}
    sites = corp.find_sites(bamba(), batch)
    assert [len(found) for found in (sites.mlp, sites.attention, sites.values)] == [2, 1, 1]
    assert not sites.refused
    reasons = {layer.name: layer.reason for layer in sites.layers if layer.state == "refused"}
    assert reasons["model.layers.0.mamba.in_proj"] == "Linear is part of no MLP or attention that was recognised"


@pytest.mark.slow
def test_a_mask_that_marks_no_padding_hides_no_token() -> None:
    images = [{"pixel_values": torch.randn(2, 3, 64, 64, generator=seeded(i))} for i in range(2)]
    check_model(mask2former(), images, show=None).require()


def test_values_of_torchvisions_maxvit_are_merged_by_their_output_projection() -> None:
    stages: dict[str, Any] = {"stem_channels": 16, "block_channels": [16], "block_layers": [1], "head_dim": 8}
    seed_all(3)
    model = torchvision.models.MaxVit((32, 32), partition_size=2, stochastic_depth_prob=0.0, num_classes=5, **stages)
    sites = corp.find_sites(model.eval(), torch.randn(2, 3, 32, 32, generator=seeded(1)))
    assert {site.down for site in sites.values} <= sites.proven
    assert (len(sites.attention), len(sites.values)) == (2, 2)
