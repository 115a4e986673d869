"""Attentions of transformers that normalise every head of queries and keys, recognised by what they compute.

A class that projects, normalises, rotates and attends like Qwen3's is narrowed like Qwen3's. This is verified by a
trial: at full width, corp's replacement must compute the same as the module. Random numbers replace the outputs of its
layers, so that the result depends on the class and not on its weights, which may not be loaded yet.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from corp.adapters.hf_layers import Attention, Family, attention_sites, kernel
from corp.adapters.hf_rotary import NORMED, WINDOW, rotary_names, window_of
from corp.adapters.notes import is_causal
from corp.adapters.proof import distance, tolerance
from corp.adapters.symmetry import noise
from corp.calibration.hooks import modules_around, removing
from corp.calibration.threads import here
from corp.sites import Finding
from corp.surgery.hf_attention import NarrowAttention, RotaryAttention, narrow

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", *NORMED.norms)
SHAPE = (2, 5)  # samples and tokens


def normed_attentions(model: nn.Module, known: Container[str]) -> Iterator[Finding]:
    """Queries, keys and values of attentions that are in no table but compute the same as Qwen3's."""
    for name, module in model.named_modules():
        if name in known or not _looks_normed(module):
            continue
        shift = 0.0 if isinstance(module, NarrowAttention) else _gain_shift(module)
        if shift is None or not (isinstance(module, NarrowAttention) or _is_replaced(module)):
            continue
        layer, _, path = name.rpartition(".")
        dense = _dense_class(module)
        entry = Attention(
            path,
            dense.__name__,
            _names_of(module),
            causal=is_causal(model, name),
            convention=RotaryAttention,
            window=window_of,
            gain_shift=shift,
        )
        family = Family(dense.__module__.removeprefix("transformers.models."))
        owner = next(one for one in modules_around(name) if isinstance(model.get_submodule(one), PreTrainedModel))
        yield from attention_sites(model, layer, owner, entry, family)


def _dense_class(module: Any) -> type[nn.Module]:
    dense: type[nn.Module] = module.dense_class if isinstance(module, NarrowAttention) else type(module)
    return dense


def _names_of(module: Any) -> Any:
    return rotary_names("o_proj", norms=NORMED.norms, extras=WINDOW if hasattr(module, "sliding_window") else ())


def _looks_normed(module: Any) -> bool:
    """Whether a module has the parts of such an attention, no other parameters, and rotates whole heads."""
    owners = {name.partition(".")[0] for name, _ in module.named_parameters()}
    if owners != set(LAYERS) or not hasattr(module, "config"):
        return False
    dense = _dense_class(module)
    beside = sys.modules.get(dense.__module__)
    rope = getattr(module.config, "rope_parameters", None) or {}
    factors = getattr(module.config, "partial_rotary_factor", None), rope.get("partial_rotary_factor")
    return (
        dense.__module__.startswith("transformers.models.")
        and hasattr(beside, "eager_attention_forward")
        and "position_embeddings" in inspect.signature(dense.forward).parameters
        and all(factor in (None, 1, 1.0) for factor in factors)
        and all(hasattr(module, name) for name in ("head_dim", "scaling", "attention_dropout"))
    )


def _gain_shift(module: Any) -> float | None:
    """What is added to a norm's weight to get its gain; None if its norms are not RMS norms of one head."""
    d = module.head_dim
    x, weight = (noise(name, torch.empty(*shape)) for name, shape in (("x", (3, d)), ("weight", (d,))))
    found: set[float | None] = set()
    for norm in (module.q_norm, module.k_norm):
        eps = next((getattr(norm, word) for word in ("variance_epsilon", "eps") if hasattr(norm, word)), None)
        if [tuple(p.shape) for p in norm.parameters()] != [(d,)] or eps is None:
            return None
        made = functional_call(norm, {"weight": weight}, (x,))
        plain = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        found.add(
            next((shift for shift in (0.0, 1.0) if torch.allclose(made, plain * (weight + shift), atol=1e-4)), None)
        )
    return found.pop() if len(found) == 1 else None


@torch.no_grad()
def _is_replaced(module: Any) -> bool:
    """Whether corp's rotary attention of this width, with the module's own layers, computes the same as the module."""
    dense = copy.copy(module)
    dense.config = copy.copy(module.config)
    dense.config._attn_implementation = "eager"
    try:
        made = narrow(dense, names=_names_of(module), cross=False, lookup=kernel, convention=RotaryAttention)
        every = torch.arange(made.qk_dim).repeat(made.kv_count, 1)
        made.frequencies = every.to(_place(module))
        return (distance([(_taken(dense), _taken(made))]) or 0) <= tolerance(_weight(module).dtype)
    except Exception:  # its code does something else
        return False


def _taken(attention: Any) -> Tensor:
    """The input of the output projection if queries, keys, values and gains are random numbers."""
    place, like = _place(attention), _weight(attention)
    seen: list[Tensor] = []
    handles = [attention.o_proj.register_forward_pre_hook(here(lambda _m, args: seen.append(args[0])))]
    for name in ("q_proj", "k_proj", "v_proj"):

        def after(_m: nn.Module, _a: Any, output: Tensor, name: str = name) -> Tensor:
            return noise(name, torch.empty(output.shape, dtype=output.dtype)).to(place)

        handles.append(getattr(attention, name).register_forward_hook(here(after)))
    states = torch.zeros(*SHAPE, attention.q_proj.in_features, dtype=like.dtype, device=like.device)
    angles = noise("angles", torch.empty(*SHAPE, attention.head_dim // 2)).repeat(1, 1, 2).to(place, like.dtype)
    gains = {
        f"{norm}.weight": noise(norm, torch.empty(attention.head_dim)).to(place, like.dtype) for norm in NORMED.norms
    }
    call = {"hidden_states": states, "position_embeddings": (angles.cos(), angles.sin()), "attention_mask": None}
    with removing(handles):
        functional_call(attention, gains, (), call)
    return seen[0]


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.q_proj.weight
    return weight


def _place(module: Any) -> torch.device:
    """The device on which numbers are drawn: that of the weights, if they are loaded."""
    device = _weight(module).device
    return torch.device("cpu") if device.type == "meta" else device
