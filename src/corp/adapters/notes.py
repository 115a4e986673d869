"""What structure alone does not reveal about a site: which tokens are real, and whether a query sees later keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from corp.adapters.attention_names import CROSS
from corp.adapters.linears import in_block
from corp.calibration.hooks import modules_around
from corp.sites import AttentionSite, Mask, MLPSite, Refusal, Site, module_of

EXPERT = re.compile(r"(?:^|\.)experts?(?:\.|$)|(?:^|\.)expert_\d+")
MASK, ENCODER_MASK = "attention_mask", "encoder_attention_mask"


def takes(cls: type[nn.Module], argument: str) -> bool:
    """Whether the forward of this class has an argument of this name."""
    return argument in inspect.signature(cls.forward).parameters


def mask_of(model: nn.Module, site: str, argument: str = MASK) -> Mask | None:
    """The mask argument of the innermost module around all blocks, or of one further out; None if none has one."""
    owners = [
        n for n in modules_around(site) if not in_block(f"{n}.x") and takes(type(model.get_submodule(n)), argument)
    ]
    return Mask(owners[0], argument, around=tuple(owners[1:])) if owners else None


def noted(model: nn.Module, site: Site) -> Site:
    """The site with its masks and its causality."""
    name = module_of(site)
    if isinstance(site, MLPSite):
        if EXPERT.search(site.name):
            return replace(site, experts=site.experts or name.rpartition(".")[0])
        return replace(site, mask=mask_of(model, site.name))
    mask = mask_of(model, name)
    if not isinstance(site, AttentionSite):
        return replace(site, mask=mask)
    if CROSS.search(name):
        return replace(site, q_mask=mask, k_mask=mask_of(model, name, ENCODER_MASK))
    return replace(site, q_mask=mask, k_mask=mask, causal=is_causal(model, name), window=window_of(model, name))


def told_outside(model: nn.Module, site: Site) -> Site:
    """The site of an adapter, with outer modules that may get its mask; inside, the mask may be a derived one."""
    fields = ("q_mask", "k_mask") if isinstance(site, AttentionSite) else ("mask",)
    masks = {name: mask for name in fields if (mask := getattr(site, name)) is not None and not mask.around}
    return replace(site, **{name: replace(mask, around=_outside(model, mask)) for name, mask in masks.items()})


def _outside(model: nn.Module, mask: Mask) -> tuple[str, ...]:
    around = modules_around(mask.module) if mask.module else []
    return tuple(name for name in around if takes(type(model.get_submodule(name)), mask.argument))


def is_causal(model: nn.Module, name: str) -> bool:
    """Whether an attention is causal: by its attributes or config, otherwise by whether the model generates text."""
    module: Any = model.get_submodule(name)
    for known in (getattr(module, "is_causal", None), getattr(module, "causal", None)):
        if isinstance(known, bool):
            return known
    config = getattr(module, "config", None) or getattr(model, "config", None)
    if getattr(module, "is_decoder", False) or getattr(config, "is_decoder", False):
        return True
    around = [type(model.get_submodule(one)).__name__ for one in modules_around(name)]
    if any("encoder" in cls.lower() for cls in around):
        return False
    return any(cls.endswith(("ForCausalLM", "LMHeadModel")) or "Decoder" in cls for cls in around)


def window_of(model: nn.Module, name: str) -> int | None:
    """The largest number of keys that a causal query sees."""
    module: Any = model.get_submodule(name)
    owner = module if hasattr(module, "sliding_window") else getattr(module, "config", None)
    found = getattr(owner, "sliding_window", None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def latent_attentions(model: nn.Module) -> Iterator[Refusal]:
    """Attentions that compute keys and values from one compressed state (DeepSeek's MLA)."""
    for name, module in model.named_modules():
        if {"kv_b_proj", "o_proj"} <= {child for child, _ in module.named_children()}:
            reason = f"{type(module).__name__} makes keys and values of one compressed state, which is not understood"
            yield Refusal(name, "attn", reason)
            yield Refusal(f"{name}.o_proj", "vo", reason)
