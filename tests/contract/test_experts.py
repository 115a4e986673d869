"""Mixtures of experts: packed in three-dimensional parameters or modules of their own, found, proven and narrowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import corp
from corp import Recipe
from corp.calibration.experts import filled
from corp.calibration.moments import Moments
from corp.calibration.site_sums import SiteSums
from corp.surgery.experts import Experts
from corp.surgery.opened import opened
from corp.testing import check_model
from tests.helpers.hf_models import TEXT

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # few samples, on purpose
TINY = {**TEXT, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 8, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
SWITCH = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_heads": 3}
SWITCH |= {"num_decoder_layers": 1, "num_sparse_decoder_layers": 0, "num_experts": 2, "vocab_size": 50}
MODELS = {
    "concatenated": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TINY)),
    "interleaved, transposed, biased": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**TINY, sliding_window=8)),
}


def build(make: Any) -> Any:
    torch.manual_seed(1)
    model = make().double().eval()
    model.config._experts_implementation = "eager"  # the grouped kernels of the CPU take no float64
    with torch.no_grad():  # random initialisation is tiny, and leaves some parameters as memory was
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def ids(seed: int, *names: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randint(3, 50, (8, 11), generator=draw) for name in names or ("input_ids",)}


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_contract_holds_for_packed_experts(name: str) -> None:
    model = build(MODELS[name])
    rows = check_model(model, [ids(0), ids(1)], show=None)
    assert [(row.name, row.detail) for row in rows if not row.passed] == []
    sites = corp.find_sites(model, ids(0))
    assert [site.experts for site in sites.mlp] == ["model.layers.0.mlp.experts"] * 4


@pytest.mark.parametrize("name", MODELS)
def test_experts_one_by_one_compute_the_same_without_more_memory(name: str) -> None:
    model = build(MODELS[name])
    apart = opened(model)
    with torch.no_grad():
        torch.testing.assert_close(apart(**ids(0)).logits, model(**ids(0)).logits)
    packed, expert = model.model.layers[0].mlp.experts, apart.get_submodule("model.layers.0.mlp.experts.2")
    assert not any(isinstance(module, Experts) for module in model.modules())
    assert expert.up.weight.untyped_storage().data_ptr() == packed.gate_up_proj.untyped_storage().data_ptr()


def test_a_narrowed_model_is_packed_again_with_one_width_for_the_experts_of_a_layer() -> None:
    model = build(MODELS["concatenated"]).float()
    model.config._experts_implementation = "grouped_mm"
    for recipe in (Recipe(mlp=0.5), Recipe(target_params=0.8)):
        small: Any = corp.prune(model, [ids(0), ids(1)], recipe).model
        experts = small.model.layers[0].mlp.experts
        assert type(experts) is type(model.model.layers[0].mlp.experts)
        width = experts.down_proj.shape[2]
        assert width < 24
        assert width % 8 == 0
        assert experts.gate_up_proj.shape == (4, 2 * width, 32)
        assert small(**ids(2)).logits.isfinite().all()


def test_an_expert_is_calibrated_on_the_tokens_that_are_routed_to_it() -> None:
    model = build(MODELS["concatenated"])
    block = model.model.layers[0].mlp
    seen: list[Any] = []
    handle = block.experts.register_forward_pre_hook(lambda _m, args: seen.append(args))
    with torch.no_grad():
        model(**ids(0))
    handle.remove()
    hidden, routes, _ = seen[0]
    x = hidden[(routes == 2).any(-1)]  # (n, D)
    gate, up = (x @ block.experts.gate_up_proj[2].mT).chunk(2, -1)
    channels = nn.functional.silu(gate) * up
    moments = corp.calibrate(model, [ids(0)]).moments_of("model.layers.0.mlp.experts.2").total()
    assert moments.seen == len(x)
    torch.testing.assert_close(moments.mean, channels.mean(0))
    torch.testing.assert_close(moments.cov(), channels.T.cov(correction=0))


def test_an_expert_without_tokens_is_narrowed_by_its_weights_and_named() -> None:
    model = build(MODELS["concatenated"])
    router = model.model.layers[0].mlp.gate
    with torch.no_grad():  # a direction that all tokens have, and that the last expert dislikes
        model.model.embed_tokens.weight[:, 0] = 10
        router.weight[:, 0] = torch.tensor([0.0, 0.0, 0.0, -100.0])
        model.model.layers[0].post_attention_layernorm.weight.fill_(1)
    result = corp.prune(model, [ids(0), ids(1)], Recipe(mlp=0.5, sequential=False))
    (note,) = [note for note in result.plan.notes if "fewer tokens" in note]
    assert "model.layers.0.mlp.experts.3" in note
    last = next(site for site in result.plan.sites if site.name.endswith("experts.3"))
    W = model.model.layers[0].mlp.experts.down_proj[3]  # (32, 24)
    assert set(last.kept[0]) == set(W.square().sum(0).topk(16).indices.tolist())


def test_sums_of_few_tokens_keep_every_channel_to_itself() -> None:
    few, many = Moments(6), Moments(6)
    few.update(torch.randn(3, 6, dtype=torch.float64))
    many.update(torch.randn(9, 6, dtype=torch.float64))
    assert filled(SiteSums(many, Moments(6))).fit is many
    cov = filled(SiteSums(few, Moments(6))).total().cov()
    torch.testing.assert_close(cov, torch.diag((3 * few.energy + few.energy.mean()) / 4))
    torch.testing.assert_close(filled(SiteSums(Moments(6), Moments(6))).total().cov(), torch.eye(6).double())


def test_experts_that_are_modules_of_their_own() -> None:
    model = build(lambda: hf.SwitchTransformersModel(hf.SwitchTransformersConfig(**SWITCH))).float()  # as its router
    batch = ids(0, "input_ids", "decoder_input_ids")
    rows = check_model(model, [batch, batch], show=None)
    assert [(row.name, row.detail) for row in rows if not row.passed] == []
    routed = [site.name for site in corp.find_sites(model, batch).mlp if site.experts]
    inside = ("encoder.block.1.layer.1.mlp", "decoder.block.0.layer.2.mlp")
    assert set(routed) == {f"{place}.experts.expert_{number}" for place in inside for number in range(2)}


class Own(nn.Module):
    """Experts packed in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, 8, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.up.sum(0)).relu() @ self.down.sum(0)


def test_other_packings_are_refused_by_name() -> None:
    found = corp.find_sites(nn.Sequential(Own(), Own())).refused
    assert [r.name for r in found] == ["0", "1"]
    assert "Own keeps its experts packed in one parameter in a way of its own" in found[0].reason


def test_experts_in_one_parameter_each_and_latent_attention_are_refused_by_name() -> None:
    jet = hf.JetMoeConfig(**{**TINY, "kv_channels": 8, "head_dim": 8})
    refused = {r.name: r.reason for r in corp.find_sites(hf.JetMoeModel(jet).eval()).refused}
    assert "JetMoeParallelExperts keeps its experts packed" in refused["layers.0.mlp.input_linear"]
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = hf.DeepseekV3Config(
        **{**TEXT, "num_hidden_layers": 1, "first_k_dense_replace": 1, "num_key_value_heads": 3, **latent}
    )
    sites = corp.find_sites(hf.DeepseekV3Model(config).eval())
    assert len(sites.mlp) == 1
    assert {(r.name, r.kind) for r in sites.refused} == {
        ("layers.0.self_attn", "attn"),
        ("layers.0.self_attn.o_proj", "vo"),
    }
    assert all("one compressed state" in r.reason for r in sites.refused)
