"""Models that no table knows: found by structure, tried out on the model, and the whole contract on each of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from timm.layers import AttentionRope
from torch import Tensor, nn

import corp
from corp.adapters import proof
from corp.adapters.verify import verify
from corp.sites import MLPSite, Refusal, Rows
from corp.testing import check_model
from tests.helpers.hf_models import IMAGE, TEXT
from tests.helpers.models import SMALL, vit
from tests.helpers.seeds import seed_all, seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
GROUPED = {**TEXT, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
T5 = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 3, "vocab_size": 50}
T5 |= {"feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0}
SWIN = {"img_size": 16, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4)}


LONG = {**TEXT, "attention_window": 4, "max_position_embeddings": 40, "pad_token_id": 1}
ROPE = {"use_rot_pos_emb": True, "qkv_fused": False, "rope_type": "dinov3", "rope_rotate_half": True}


class Block(nn.Module):
    """A user's own: grouped queries, packed projections, a gate in one half."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 2
        self.norm, self.qkv, self.proj = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(24, 24)
        self.w1, self.w2 = nn.Linear(24, 80), nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split((24, 12, 12), -1)
        q, k, v = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        x = x + self.proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.w1(x).chunk(2, -1)
        out: Tensor = x + self.w2(nn.functional.silu(gate) * up)
        return out


def ids(*names: str) -> dict[str, Tensor]:
    g = seeded(1)
    return {name: torch.randint(3, 50, (8, 11), generator=g) for name in names}


def padded_ids() -> dict[str, Tensor]:
    """Not a multiple of Longformer's window either."""
    made = ids("input_ids")
    made["attention_mask"] = (torch.arange(11) < torch.tensor([[11], [7]]).repeat(4, 1)).long()
    return made


def images(size: int = 16) -> Tensor:
    return torch.randn(8, 3, size, size, generator=seeded(1), dtype=torch.float64)


# What to build, a batch, and how many MLPs, Q/K and V/O there are to find.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], tuple[int, int, int]]] = {
    "t5": (lambda: hf.T5Model(hf.T5Config(**T5)), lambda: ids("input_ids", "decoder_input_ids"), (2, 3, 3)),
    "neighbouring-pairs": (lambda: hf.CohereModel(hf.CohereConfig(**GROUPED)), lambda: ids("input_ids"), (2, 2, 2)),
    "qk-norm-of-all-heads": (lambda: hf.Olmo2Model(hf.Olmo2Config(**GROUPED)), lambda: ids("input_ids"), (2, 0, 2)),
    "alibi-by-head": (
        lambda: hf.BloomModel(hf.BloomConfig(vocab_size=50, hidden_size=24, n_layer=1, n_head=3)),
        lambda: ids("input_ids"),
        (1, 1, 1),
    ),
    "windows": (
        lambda: timm.models.swin_transformer.SwinTransformer(**SWIN, num_classes=5),
        images,
        (3, 3, 3),
    ),
    "cosine": (
        lambda: timm.models.swin_transformer_v2.SwinTransformerV2(**{**SWIN, "num_heads": (4, 4)}),
        images,
        (3, 0, 3),
    ),
    "samples-second": (lambda: hf.LongformerModel(hf.LongformerConfig(**LONG)), padded_ids, (2, 2, 2)),
    "rope-2d": (
        lambda: timm.models.eva.Eva(**SMALL, **ROPE),
        images,
        (2, 2, 2),
    ),
    "partial-rotary": (
        lambda: hf.NemotronModel(hf.NemotronConfig(**GROUPED, partial_rotary_factor=0.5)),
        lambda: ids("input_ids"),
        (2, 2, 2),
    ),
    "one-query": (
        lambda: timm.models.cait.Cait(
            img_size=16, patch_size=4, embed_dim=24, depth=1, depth_token_only=1, num_heads=3, num_classes=5
        ),
        images,
        (2, 2, 2),
    ),
    "biases-apart": (lambda: timm.models.eva.Eva(**SMALL, use_rot_pos_emb=True), images, (2, 2, 2)),
    "own": (
        lambda: nn.Sequential(Block(), Block()),
        lambda: torch.randn(8, 9, 24, generator=seeded(1), dtype=torch.float64),
        (2, 2, 2),
    ),
}


def build(name: str) -> nn.Module:
    seed_all(3)
    model = MODELS[name][0]().double().eval()
    with torch.no_grad():  # random initialisation is tiny: every part must matter
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_contract_holds(name: str) -> None:
    model, batch = build(name), MODELS[name][1]()
    rows = check_model(model, [batch, batch], show=None)
    assert [(row.name, row.detail) for row in rows if not row.passed] == []
    sites = corp.find_sites(model, batch)
    assert (len(sites.mlp), len(sites.attention), len(sites.values)) == MODELS[name][2]
    assert sites.proven == {site.name for site in sites}


def test_cosine_attention_is_refused_with_its_reason() -> None:
    for refusal in corp.find_sites(build("cosine"), images()).refused:
        assert refusal.kind == "attn"
        assert "its code normalises vectors" in refusal.reason


def test_a_broken_promise_is_told() -> None:
    model = build("own")
    rows = check_model(model, torch.full((2, 5, 24), float("nan"), dtype=torch.float64), show=None)
    assert not all(row.passed for row in rows)


# Wrong claims. Each is tried out by `verify` alone, as if structure had pointed there.


def refused(model: nn.Module, batch: Tensor, site: Any) -> list[Refusal]:
    return verify(model, lambda: model(batch), [], [site]).refused


class Between(nn.Module):
    """Two linear layers and something between them."""

    def __init__(self, between: nn.Module, leak: float = 0.0) -> None:
        super().__init__()
        self.up, self.between, self.down, self.leak = nn.Linear(8, 16), between, nn.Linear(16, 8), leak

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        out: Tensor = x + self.down(self.between(hidden)) + self.leak * hidden.sum(-1, keepdim=True)
        return out


SITE = MLPSite("mlp", (Rows("up", 0, 16),), "down")


@pytest.mark.parametrize(
    ("between", "leak", "reason"),
    [
        (nn.LayerNorm(16, elementwise_affine=False), 0.0, "permuting its channels"),
        (nn.Softmax(-1), 0.0, "permuting its channels"),
        (nn.Linear(16, 16), 0.0, "permuting its channels"),
        (nn.GELU(), 1.0, "something besides its own layer"),
    ],
)
def test_what_mixes_or_leaks_hidden_channels_is_refused(between: nn.Module, leak: float, reason: str) -> None:
    (found,) = refused(Between(between, leak).eval(), torch.randn(4, 8), SITE)
    assert reason in found.reason


def test_an_elementwise_function_is_accepted() -> None:
    assert refused(Between(nn.GELU()).eval(), torch.randn(4, 8), SITE) == []


def test_the_wrong_number_of_heads_is_refused() -> None:
    model: Any = vit().eval()
    site = corp.find_sites(model).values[0]
    wrong = dataclasses.replace(site, heads=1)
    (found,) = refused(model, torch.randn(2, 3, 16, 16), wrong)
    assert "mapping its values" in found.reason


def test_trying_out_leaves_the_model_as_it_was_also_when_it_fails() -> None:
    model = Between(nn.GELU()).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    places = proof.places_of(model, [SITE], {})

    def run() -> Tensor:
        model(torch.ones(2, 8))
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        proof.attempt(model, run, places, [SITE])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_parameters_per_channel_are_refused_even_where_they_do_nothing_yet() -> None:
    """A zero gain or a norm's ones pass every trial on a fresh model, but cannot be narrowed."""
    model = nn.Sequential(Between(nn.PReLU(16)), Between(nn.PReLU(16)))
    (first, second) = corp.find_sites(model).refused
    assert "parameters of its own for every hidden channel" in first.reason
    assert second.kind == "mlp"


def test_rotary_attention_of_timm_is_taken_with_its_kernel() -> None:
    sites = corp.find_sites(vit(attn_layer=AttentionRope))
    assert sites.refused == ()
    assert all(site.padded for site in sites.attention)


def test_a_batch_that_reaches_nothing_is_said() -> None:
    model = hf.BartForCausalLM(
        hf.BartConfig(d_model=24, decoder_layers=1, decoder_attention_heads=3, decoder_ffn_dim=40, vocab_size=50)
    ).eval()
    refused = {r.name: r.reason for r in corp.find_sites(model, ids("input_ids")).refused}
    assert refused["model.decoder.layers.0.encoder_attn"] == "nothing of the batch reaches it"


def test_every_layer_is_accounted_for() -> None:
    model = build("windows")
    sites = corp.find_sites(model)
    assert sum(layer.params for layer in sites.layers) == sum(p.numel() for p in model.parameters())
    shares = sites.coverage()
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["pruned"] > 0.5
    assert all(layer.reason for layer in sites.layers if layer.state != "pruned")


class Normalised(Block):
    """Queries and keys are normalised by a function: no module tells."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).split((24, 12, 12), -1)
        q, k, v = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in (q, k, v))
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        out: Tensor = x + self.proj(
            nn.functional.scaled_dot_product_attention(q, k, v, scale=4.0).transpose(1, 2).flatten(2)
        )
        return out


def test_a_norm_of_queries_that_is_no_module_is_found_out() -> None:
    model = nn.Sequential(Normalised()).double().eval()
    sites = corp.find_sites(model, torch.randn(2, 9, 24, dtype=torch.float64))
    assert [r.name for r in sites.refused if r.kind == "attn"] == ["0"]
    assert [site.name for site in sites.values] == ["0.proj"]


def test_where_outputs_belong_is_saved_and_checked(tmp_path: Path) -> None:
    model = build("alibi-by-head")
    result = corp.prune(model, [ids("input_ids")], corp.Recipe(attn=0.5))
    corp.save(result, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(".index")]
    tensors[name].zero_()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(corp.errors.StorageError, match="does not say where its outputs belong"):
        corp.load(tmp_path / "model", base=model)


def test_inputs_that_have_to_fit_each_other_are_counted_as_they_come() -> None:
    """Zeros in their shapes hold no image token, so the model does not take them."""
    vision = {**IMAGE, "hidden_size": 32, "num_attention_heads": 4, "model_type": "clip_vision_model"}
    config = hf.LlavaConfig(
        text_config={**GROUPED, "model_type": "llama"}, vision_config=vision, image_token_id=3, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = hf.LlavaForConditionalGeneration(config).double().eval()
    batch = {"input_ids": ids("input_ids")["input_ids"].clamp(min=4), "pixel_values": images()}
    batch["input_ids"] = torch.cat([torch.full((8, 16), 3), batch["input_ids"]], 1)
    result = corp.prune(model, [batch, batch], corp.Recipe(target_macs=0.8))
    dense, smaller = result.report.macs or (1, 1)
    assert smaller <= 0.8 * dense
