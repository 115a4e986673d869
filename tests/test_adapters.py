"""One contract that every model family passes, on tiny random models; and what is refused, with the reason."""

from __future__ import annotations

import copy

import pytest
import torch
from timm.layers import AttentionRope
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

import corp
from corp import CorpError, Recipe
from corp.sites import MLPSite, Rows
from tests.models import FAMILIES, build, images, vit


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def test_everything_is_found_and_nothing_refused(family: str) -> None:
    sites = corp.find_sites(build(family))
    blocks = 4 if family == "parallel-things" else 2
    pools = 1 if family == "siglip" else 0
    assert (len(sites.mlp), len(sites.attention)) == (blocks + pools, blocks + pools)
    assert not sites.refused
    assert all(site.width == 8 and site.heads == 3 for site in sites.attention if site.name != "attn_pool")


def test_zero_sparsity_is_the_identity(family: str) -> None:
    model, data = build(family), images()
    result = corp.prune(model, data, Recipe())
    assert torch.equal(run(result.model, data[0]), run(model, data[0]))
    assert result.plan.sites == ()


def test_the_dense_model_is_left_as_it_was(family: str) -> None:
    model, data = build(family).train(), images()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    corp.prune(model, data, Recipe(mlp=0.5, attn=0.5))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_pruned_model_is_smaller_dense_and_trainable(family: str) -> None:
    model, data = build(family), images()
    result = corp.prune(model, data, Recipe(mlp=0.5, attn=0.5))
    assert result.report.params[1] < result.report.params[0]
    assert result.report.macs is not None
    assert result.report.macs[1] < result.report.macs[0]
    result.model(data[0]).sum().backward()
    assert all(p.grad is not None for n, p in result.model.named_parameters() if "blocks.0" in n and p.requires_grad)
    sites = corp.find_sites(result.model)
    assert all(site.width == 4 for site in sites.attention if site.name != "attn_pool")


def test_predicted_distortion_equals_the_measured_one_at_every_site(family: str) -> None:
    """Feed each pruned site the dense model's inputs and compare with the plan, ridge > 0."""
    model, data = build(family), images()
    recipe = Recipe(mlp=0.4, attn=0.5, ridge=1e-2)
    result = corp.prune(model, data, recipe)
    sites = corp.find_sites(model)
    dense, pruned = recorded(model, data), recorded(result.model, data, replace=model)
    for planned in result.plan.sites:
        site = sites[planned.name]
        if isinstance(site, MLPSite):
            difference = dense[site.down] - pruned[site.down]
            tokens = difference.numel() // difference.shape[-1]
            measured = [float(difference.square().sum()) / tokens]
        else:
            measured = [
                sum(
                    float((a - b).square().sum())
                    for a, b in zip(logits(dense, site, h), logits(pruned, site, h), strict=True)
                )
                for h in range(site.heads)
            ]
        for cost, value in zip(planned.costs, measured, strict=True):
            assert pytest.approx(value, rel=1e-6, abs=1e-9 * cost.energy) == cost.J


def recorded(model: nn.Module, data: list[Tensor], replace: nn.Module | None = None) -> dict[str, Tensor]:
    """Outputs of every linear layer over the data. With `replace`, inputs come from that dense model instead:
    each module's input is what the same-named module of the dense model sees (hidden channels: of this model)."""
    outputs: dict[str, list[Tensor]] = {}
    inputs: dict[str, list[Tensor]] = {}
    source = replace or model
    handles = [
        module.register_forward_hook(lambda _m, args, _o, name=name: inputs.setdefault(name, []).append(args[0]))
        for name, module in source.named_modules()
        if isinstance(module, nn.Linear) or name.endswith("mlp")
    ]
    for x in data:
        run(source, x)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        for name, batches in inputs.items():
            module = model.get_submodule(name)
            if name.endswith("mlp"):
                down = f"{name}.fc2"
                handle = model.get_submodule(down).register_forward_hook(
                    lambda _m, _a, out, down=down: outputs.setdefault(down, []).append(out)
                )
                for batch in batches:
                    module(batch)
                handle.remove()
            elif not name.endswith("fc2"):
                outputs.setdefault(name, []).extend(module(batch) for batch in batches)
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def logits(outputs: dict[str, Tensor], site: corp.sites.AttentionSite, head: int) -> list[Tensor]:
    """Q K^T of one head, per sample; the number of q and k columns is read off the projection itself."""
    packed = site.q.module == site.k.module
    q_all, k_all = outputs[site.q.module], outputs[site.k.module]
    values = site.heads * 8 if site.name != "attn_pool" else site.k.width
    width = (q_all.shape[-1] - values) // 2 if packed else q_all.shape[-1]
    d = width // site.heads
    start = width if packed else 0
    q = q_all[..., :width].unflatten(-1, (site.heads, d))[:, :, head]
    k = k_all[..., start : start + width].unflatten(-1, (site.heads, d))[:, :, head]
    return [a @ b.T for a, b in zip(q, k, strict=True)]


def test_redundant_channels_are_pruned_without_loss(family: str) -> None:
    """Copies of hidden channels carry nothing new: removing half of them must not change the output."""
    model, data = build(family), images()
    with torch.no_grad():
        for site in corp.find_sites(model).mlp:
            for rows in site.up:
                linear = model.get_submodule(rows.module)
                half = rows.width // 2
                for tensor in (linear.weight, linear.bias):
                    if tensor is not None:
                        tensor[rows.start + half : rows.start + 2 * half] = tensor[rows.start : rows.start + half]
            # By magnitude the first of every pair is kept, though the second matters nearly as much.
            down = model.get_submodule(site.down)
            down.weight /= down.weight.norm(dim=0)
            down.weight[:, site.width // 2 :] *= 0.9
    result = corp.prune(model, data, Recipe(mlp=0.5, rank="magnitude", ridge=1e-9))
    torch.testing.assert_close(run(result.model, data[0]), run(model, data[0]), rtol=1e-5, atol=1e-5)
    assert all(site.rho2 > 0.999999 for site in result.plan.sites)


def test_redundant_dimensions_are_pruned_without_loss(family: str) -> None:
    """Heads whose Q/K dimensions are all mixtures of half as many lose half of them for nothing."""
    model, data = build(family), images()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for site in corp.find_sites(model).attention:
            half, d = site.width // 2, site.width
            for rows in (site.q, site.k):
                linear = model.get_submodule(rows.module)
                for h in range(site.heads):
                    start = rows.start + h * d
                    mix = torch.randn(d - half, half, generator=generator, dtype=torch.float64)
                    linear.weight[start + half : start + d] = mix @ linear.weight[start : start + half]
                    if linear.bias is not None:
                        linear.bias[start + half : start + d] = mix @ linear.bias[start : start + half]
    result = corp.prune(model, data, Recipe(attn=0.5, ridge=1e-10))
    torch.testing.assert_close(run(result.model, data[0]), run(model, data[0]), rtol=1e-4, atol=1e-4)


def test_same_data_same_bits(family: str) -> None:
    model, data = build(family, torch.float32), images(dtype=torch.float32)
    first, second = (corp.prune(model, data, Recipe(mlp=0.5, attn=0.5)) for _ in range(2))
    assert first.plan == second.plan
    states = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_pruned_model_can_be_pruned_again(family: str) -> None:
    model, data = build(family), images()
    once = corp.prune(model, data, Recipe(mlp=0.25, attn=0.25)).model
    twice = corp.prune(once, data, Recipe(mlp=0.25, attn=0.25)).model
    assert run(twice, data[0]).isfinite().all()
    assert sum(p.numel() for p in twice.parameters()) < sum(p.numel() for p in once.parameters())


def test_half_precision_models_keep_their_dtype(family: str) -> None:
    model, data = build(family, torch.bfloat16), images(dtype=torch.bfloat16)
    result = corp.prune(model, data, Recipe(mlp=0.5, attn=0.5))
    assert {p.dtype for p in result.model.parameters()} == {torch.bfloat16}
    assert run(result.model, data[0]).isfinite().all()


# What is not understood is refused for that kind of site only.


def test_qk_norm_refuses_attention_and_leaves_the_mlp() -> None:
    model = vit(qk_norm=True)
    sites = corp.find_sites(model)
    assert [r.name for r in sites.refused] == ["blocks.0.attn", "blocks.1.attn"]
    with pytest.raises(CorpError, match=r"blocks\.0\.attn \(attn\): QK-norm.*skip"):
        corp.prune(model, [], Recipe(attn=0.5))
    data = images(dtype=torch.float32)
    assert len(corp.prune(model, data, Recipe(mlp=0.5)).plan.sites) == 2
    assert len(corp.prune(model, data, Recipe(mlp=0.5, attn=0.5, skip="*.attn")).plan.sites) == 2


def test_norm_inside_the_mlp_refuses_the_mlp() -> None:
    sites = corp.find_sites(vit(scale_mlp_norm=True))
    assert {r.kind for r in sites.refused} == {"mlp"}
    assert "norm between activation and second linear" in sites.refused[0].reason
    assert len(sites.attention) == 2


def test_rotary_attention_is_refused_by_name() -> None:
    sites = corp.find_sites(vit(attn_layer=AttentionRope))
    assert {r.name for r in sites.refused} == {"blocks.0.attn", "blocks.1.attn"}
    assert "AttentionRope" in sites.refused[0].reason
    eva = Eva(img_size=16, patch_size=4, embed_dim=24, depth=1, num_heads=3, num_classes=5, use_rot_pos_emb=True)
    assert [r.kind for r in corp.find_sites(eva).refused] == ["attn"]
    assert len(corp.find_sites(eva).mlp) == 1


def test_fused_parallel_blocks_are_refused() -> None:
    sites = corp.find_sites(vit(block_fn=ParallelScalingBlock))
    assert len(sites) == 0
    assert {r.kind for r in sites.refused} == {"mlp", "attn"}


def test_parametrised_linears_are_refused() -> None:
    model = vit()
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.fc2)
    refused = corp.find_sites(model).refused
    assert [r.name for r in refused] == ["blocks.0.mlp"]
    assert "not a plain nn.Linear" in refused[0].reason


def test_unknown_models_are_refused_with_a_way_out() -> None:
    with pytest.raises(CorpError, match=r"no adapter knows .*Sequential.*register_adapter"):
        corp.find_sites(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(CorpError, match=r"expected a torch\.nn\.Module, got str"):
        corp.find_sites("deit_tiny")  # type: ignore[arg-type]


def test_a_backbone_inside_a_module_is_found() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = build("vit")

        def forward(self, x: Tensor) -> Tensor:
            return self.backbone(x) * 2

    model, data = Head(), images()
    assert corp.find_sites(model).mlp[0].name == "backbone.blocks.0.mlp"
    result = corp.prune(model, data, Recipe(mlp=0.5, attn=0.5))
    assert result.report.params[1] < result.report.params[0]


class TwoLayer(nn.Module):
    """A model no built-in adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 20), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def test_a_user_can_register_an_adapter_in_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.adapters.registry._registered", {})

    def find(model: nn.Module) -> list[MLPSite] | None:
        if not isinstance(model, TwoLayer):
            return None
        return [MLPSite("mlp", up=(Rows("first", 0, 20),), down="second")]

    corp.register_adapter("two-layer", find)
    model = TwoLayer()
    result = corp.prune(model, [torch.randn(64, 6) for _ in range(4)], Recipe(mlp=0.5))
    assert result.model.first.out_features == 10
    assert len(corp.find_sites(vit())) == 4  # the built-in ones still answer


def test_a_failing_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.adapters.registry._registered", {})
    corp.register_adapter("broken", lambda model: model.no_such_thing)
    with pytest.raises(CorpError, match="adapter 'broken' failed on VisionTransformer"):
        corp.find_sites(vit())
