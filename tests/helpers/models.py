"""Tiny random models of every family, in float64 where exactness is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import GluMlp, SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelThingsBlock, ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

import corp
from corp import Recipe, Result
from corp.planning.plan import Plan
from tests.helpers import hf_models
from tests.helpers.seeds import seed_all, seeded

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
swiglu_packed = partial(GluMlp, act_layer=nn.SiLU, gate_last=False)

TIMM: dict[str, Callable[[], nn.Module]] = {
    "vit": lambda: VisionTransformer(**SMALL),
    "deit-distilled": lambda: VisionTransformerDistilled(**SMALL),
    "deit3-layerscale": lambda: VisionTransformer(**SMALL, no_embed_class=True, init_values=0.5),
    "dinov2": lambda: VisionTransformer(**SMALL, init_values=0.5),
    "dinov2-registers": lambda: VisionTransformer(**SMALL, init_values=0.5, reg_tokens=4, no_embed_class=True),
    "swiglu-packed": lambda: VisionTransformer(**SMALL, mlp_layer=swiglu_packed, mlp_ratio=5.0),
    "swiglu": lambda: VisionTransformer(**SMALL, mlp_layer=SwiGLU),
    "clip": lambda: VisionTransformer(**SMALL, pre_norm=True, act_layer="quick_gelu"),
    "siglip": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="map"),
    "no-class-token": lambda: VisionTransformer(**SMALL, class_token=False, global_pool="avg"),
    "no-biases": lambda: VisionTransformer(**SMALL, qkv_bias=False, proj_bias=False),
    "post-norm": lambda: VisionTransformer(**SMALL, block_fn=ResPostBlock),
    "parallel-things": lambda: VisionTransformer(**SMALL, block_fn=ParallelThingsBlock),
    "scale-attn-norm": lambda: VisionTransformer(**SMALL, scale_attn_norm=True),
    "relative-position": lambda: VisionTransformerRelPos(**SMALL, rel_pos_type="mlp", class_token=False),
    "relative-position-bias": lambda: VisionTransformerRelPos(**SMALL, rel_pos_type="bias", class_token=False),
}
COUNTS = {"parallel-things": (4, 4), "siglip": (3, 3)}  # MLPs and attentions, where they are not two each
FAMILIES: dict[str, hf_models.Family] = {
    **{name: hf_models.Family(make, hf_models.pixels, *COUNTS.get(name, (2, 2))) for name, make in TIMM.items()},
    **hf_models.FAMILIES,
}


def build(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model whose weights are large enough that every part of it matters to the output."""
    seed_all(1)
    model = FAMILIES[family].make().to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def batches(family: str, count: int = 3, size: int = 0, dtype: torch.dtype = torch.float64) -> list[Any]:
    """Random batches that the family takes; of 50, or 20 where that is enough."""
    size = size or (50 if family in TIMM else 20)
    generator = seeded(2)
    return [_cast(FAMILIES[family].batch(size, generator), dtype) for _ in range(count)]


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    return batch.to(dtype) if batch.is_floating_point() else batch


def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def run(model: nn.Module, batch: Any) -> Tensor:
    """The model's output as one tensor."""
    with torch.no_grad():
        return hf_models.output_of(call(model, batch))


def prune(model: nn.Module, data: list[Any], recipe: Recipe) -> Result:
    """corp.prune without counting operations (inputs that go through `forward` are unknown), which takes longest."""
    return corp.prune(model, data, recipe, forward=call)


def as_saved(plan: Plan) -> Plan:
    """The plan as it comes back from its file: without the folds that planning computed."""
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict())))


def images(batches: int = 3, size: int = 50, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = seeded(2)
    return [torch.randn(size, 3, 16, 16, generator=generator).to(dtype) for _ in range(batches)]


def vit(**changes: object) -> nn.Module:
    seed_all(1)
    return VisionTransformer(**{**SMALL, **changes}).eval()
