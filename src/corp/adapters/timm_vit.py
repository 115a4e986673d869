"""timm's vision transformers: ViT, DeiT, DeiT III, DINOv2, CLIP and SigLIP image towers, relative-position ViTs.

Eva and BEiT are included: their MLPs are supported, their attention (rotary, split biases) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from timm import create_model, is_model
from timm.layers import Attention, AttentionPoolLatent, GluMlp, Mlp, SwiGLU
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn

from corp.adapters.linears import not_plain
from corp.adapters.registry import Adapter
from corp.errors import ModelError
from corp.sites import AttentionSite, Finding, MLPSite, Refusal, Rows, ValueSite
from corp.surgery.attention import LatentPool, PackedAttention, RelativeAttention

FAMILIES = (VisionTransformer, VisionTransformerRelPos, Eva, Beit)
# Supported attention classes, dense or narrowed, and their narrowed class.
BUILT: dict[type, Callable[..., nn.Module]] = {
    Attention: PackedAttention,
    RelPosAttention: RelativeAttention,
    AttentionPoolLatent: LatentPool,
    **{cls: cls for cls in (PackedAttention, RelativeAttention, LatentPool)},
}
FUSED_BLOCKS = (ParallelScalingBlock, DiffParallelScalingBlock)


def find(model: nn.Module) -> list[Finding] | None:
    """The sites of these classes; the rest of any timm model is found by structure."""
    if isinstance(model, FAMILIES):
        return list(_walk(model))
    return [] if hasattr(model, "pretrained_cfg") else None


def _walk(model: nn.Module) -> Iterator[Finding]:
    for name, module in model.named_modules():
        if not _in_a_block(name):
            continue
        # Exact types: a subclass may compute something else.
        if type(module) in (Mlp, GluMlp, SwiGLU):
            yield _mlp(name, module)
        elif type(module) in BUILT:
            yield from _attention(name, module)
        elif isinstance(module, FUSED_BLOCKS):
            reason = f"{type(module).__name__} fuses attention and MLP into one projection"
            yield from (Refusal(f"{name}.{kind}", kind, reason) for kind in ("attn", "mlp", "vo"))
        elif name.rpartition(".")[2] == "attn":  # MLPs of other classes are found by structure
            yield Refusal(name, "attn", f"{type(module).__module__}.{type(module).__name__} is not understood")


def _in_a_block(name: str) -> bool:
    """Whether a module is in a block or the pooling, but not in an attention (whose position bias may have an Mlp)."""
    *path, _ = name.split(".")
    return (path or [name])[0] in ("blocks", "attn_pool") and "attn" not in path


def _mlp(name: str, mlp: Any) -> Finding:
    split = type(mlp) is SwiGLU
    makers = ("fc1_g", "fc1_x") if split else ("fc1",)
    if problem := not_plain(mlp, *makers, "fc2"):
        return Refusal(name, "mlp", problem)
    if not isinstance(mlp.norm, nn.Identity):
        return Refusal(name, "mlp", "a norm between activation and second linear mixes all hidden channels")
    width: int = mlp.fc2.in_features
    starts = (0, width) if type(mlp) is GluMlp else (0,)  # packed: both halves of one fc1
    up = tuple(Rows(f"{name}.{maker}", start, start + width) for maker in makers for start in starts)
    return MLPSite(name, up=up, down=f"{name}.fc2")


def _attention(name: str, attention: Any) -> Iterator[Finding]:
    """Queries and keys, and values, of an attention that may have been narrowed before."""
    pool = isinstance(attention, AttentionPoolLatent | LatentPool)
    values = f"{name}.proj"
    problem = not_plain(attention, *(("q", "kv") if pool else ("qkv",)), "proj") or _normalised(attention)
    if problem:
        yield from (Refusal(name, "attn", problem), Refusal(values, "vo", problem))
        return
    heads: int = attention.num_heads
    width, value_width = (heads * getattr(attention, dim, attention.head_dim) for dim in ("qk_dim", "head_dim"))
    q_in, kv_in, start = (f"{name}.q", f"{name}.kv", 0) if pool else (f"{name}.qkv", f"{name}.qkv", width)
    build = BUILT[type(attention)]
    k = Rows(kv_in, start, start + width)
    yield AttentionSite(name, q=Rows(q_in, 0, width), k=k, heads=heads, build=build)
    if problem := _after_the_average(attention):
        yield Refusal(values, "vo", problem)
        return
    v = Rows(kv_in, k.stop, k.stop + value_width)
    yield ValueSite(values, v=v, heads=heads, down=values, attention=name, build=build)


def _after_the_average(attention: Any) -> str | None:
    """What is between the averaged values and the output projection of an attention, if anything."""
    if isinstance(attention, AttentionPoolLatent | LatentPool):
        return None
    if not isinstance(getattr(attention, "norm", nn.Identity()), nn.Identity):
        return "a norm before the output projection mixes all values"
    if getattr(attention, "gate", None) is not None:
        return "a gate has a factor for every value dimension, which cannot be rotated with them"
    return None


def _normalised(attention: Any) -> str | None:
    if all(isinstance(getattr(attention, norm, nn.Identity()), nn.Identity) for norm in ("q_norm", "k_norm")):
        return None
    return "QK-norm normalises over all head dimensions, so a correction cannot be folded through it"


# Arguments of create_model that the model stores: enough to rebuild the usual variations of a named model.
def _img_size(model: Any) -> Any:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return None if size is None else list(size)


def _channels(model: Any) -> Any:
    return next((layer.in_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)


def _pooling(model: Any) -> str | None:
    """The name of the pooling; None for convolutional models, which store a module instead."""
    pool = getattr(model, "global_pool", None)
    return pool if isinstance(pool, str) else None


_ARGS: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda m: m.num_classes,
    "img_size": _img_size,
    "in_chans": _channels,
    "global_pool": _pooling,
    "dynamic_img_size": lambda m: bool(getattr(m, "dynamic_img_size", False)),
}
_PREPROCESSING = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")


def identify(model: nn.Module) -> dict[str, Any] | None:
    """The name and the arguments from which create_model makes this architecture, and its preprocessing."""
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture = config.get("architecture")
    if not architecture or not is_model(architecture):
        return None
    with torch.device("meta"):
        plain = create_model(architecture, pretrained=False)
    args = {name: get(model) for name, get in _ARGS.items() if get(model) != get(plain)}
    preprocessing = {key: config[key] for key in _PREPROCESSING if config.get(key) is not None}
    return {"architecture": architecture, "tag": config.get("tag"), "args": args, "preprocessing": preprocessing}


def rebuild(identity: dict[str, Any]) -> nn.Module:
    """The architecture without weights. `identity` may come from an untrusted file: only known names are accepted."""
    architecture, args = identity.get("architecture"), identity.get("args", {})
    if not isinstance(architecture, str) or not is_model(architecture):
        raise ModelError(f"timm has no model called {architecture!r}; a newer timm may have it")
    known = (*_ARGS, "mlp_ratio")  # the latter is in exported models
    if not isinstance(args, dict) or not set(args) <= set(known):
        raise ModelError(f"the arguments {args!r} of {architecture} are not among {', '.join(known)}")
    preprocessing = identity.get("preprocessing", {})
    if not isinstance(preprocessing, dict) or not set(preprocessing) <= set(_PREPROCESSING):
        raise ModelError(f"the preprocessing of {architecture} is not among {', '.join(_PREPROCESSING)}")
    try:
        model: nn.Module = create_model(
            architecture, pretrained=False, pretrained_cfg_overlay={**preprocessing, "tag": identity.get("tag")}, **args
        )
    except Exception as error:  # timm's own error about an argument's value
        raise ModelError(f"timm cannot build {architecture} with {args}: {error}") from error
    return model


ADAPTER = Adapter("timm", find, identify, rebuild)
