"""transformers models: what can be pruned in them, and how they are rebuilt from their configs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from corp.adapters import hf_rotary, hf_text, hf_vision
from corp.adapters.hf_layers import find_in
from corp.adapters.hf_normed import normed_attentions
from corp.adapters.registry import Adapter
from corp.errors import ModelError
from corp.sites import Finding

FAMILIES = {family.path: family for family in (*hf_text.FAMILIES, *hf_vision.FAMILIES, *hf_rotary.FAMILIES)}
KERNELS = ("eager", "sdpa")  # others depend on the machine that runs it, not on the model
EXPERTS = ("eager", "batched_mm", "grouped_mm")
MOST_LAYERS = 1000  # an untrusted config must not take hours to build


def find(model: nn.Module) -> list[Finding] | None:
    """What the tables know; the rest of any transformers model is found by structure."""
    if not isinstance(model, PreTrainedModel):
        return None
    found = list(find_in(model, FAMILIES))
    return [*found, *normed_attentions(model, {finding.name for finding in found})]


def identify(model: nn.Module) -> dict[str, Any] | None:
    """Class and config of a model whose class is part of transformers."""
    if not isinstance(model, PreTrainedModel) or getattr(transformers, type(model).__name__, None) is not type(model):
        return None
    config = model.config.to_dict()
    for key in ("_name_or_path", "auto_map"):  # its location and code beside it, not the architecture
        config.pop(key, None)
    kernel = model.config._attn_implementation
    generation = getattr(model, "generation_config", None)
    packed = any(hasattr(module, "is_concatenated") for module in model.modules())
    experts = getattr(model.config, "_experts_implementation", None) if packed else None
    return {
        **({"experts": experts} if experts in EXPERTS else {}),
        "class": type(model).__name__,
        "config": config,
        "attention": kernel if kernel in KERNELS else None,
        **({"attentions": others} if (others := _other_kernels(model.config)) else {}),
        "generation": None if generation is None else generation.to_dict(),
        "transformers": transformers.__version__,
    }


def rebuild(identity: dict[str, Any]) -> nn.Module:
    """The architecture without weights. `identity` may come from an untrusted file: only known classes are built."""
    name, raw, kernel = identity.get("class"), identity.get("config"), identity.get("attention")
    cls: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    if not _prunable(cls):
        raise ModelError(f"transformers {transformers.__version__} has no model {name!r} that corp can prune")
    if not isinstance(raw, dict) or kernel not in (*KERNELS, None):
        raise ModelError(f"the saved config of {name} is not an object, or its attention {kernel!r} is unknown")
    refuse_deep(raw, str(name))
    try:
        config: Any = cls.config_class.from_dict(raw)
        if kernel is not None:
            config._attn_implementation = kernel
        _set_kernels(config, identity.get("attentions"))
        if identity.get("experts") in EXPERTS:
            config._experts_implementation = identity["experts"]
        with no_init_weights(), torch.no_grad():
            model: Any = cls(config)
            model.tie_weights()
            for parameter in model.parameters():  # random values would take longer, and are overwritten anyway
                parameter.zero_()
        if isinstance(generation := identity.get("generation"), dict):
            model.generation_config = GenerationConfig.from_dict(generation)
    except Exception as error:  # the library's own errors about values, of many kinds
        saved = identity.get("transformers")
        raise ModelError(
            f"transformers {transformers.__version__} cannot build {name} as saved (with {saved}): {error}"
        ) from error
    made: nn.Module = model
    return made


def _other_kernels(config: Any) -> dict[str, str]:
    """The kernels of parts of a model, by the path of their configs, if they differ from that of the whole."""
    kernels = {path: part._attn_implementation for path, part in _parts(config)}
    return {path: one for path, one in kernels.items() if one in KERNELS and one != config._attn_implementation}


def _set_kernels(config: Any, kernels: Any) -> None:
    for path, part in list(_parts(config)) if isinstance(kernels, dict) else []:
        if kernels.get(path) in KERNELS:
            part._attn_implementation = kernels[path]


def _parts(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The configs inside a config, outer ones first."""
    for name in getattr(config, "sub_configs", {}):
        if hasattr(part := getattr(config, name, None), "_attn_implementation"):
            yield f"{prefix}{name}", part
            yield from _parts(part, f"{prefix}{name}.")


def refuse_deep(config: dict[str, Any], name: str) -> None:
    deep = [key for key, value in _items(config) if "layers" in key and isinstance(value, int) and value > MOST_LAYERS]
    if deep:
        raise ModelError(f"the config of {name} asks for more than {MOST_LAYERS} layers ({deep[0]})")


def _prunable(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel


def _items(raw: dict[str, Any]) -> list[tuple[str, Any]]:
    """Keys and values of a config and of the configs inside it."""
    inner = [item for value in raw.values() if isinstance(value, dict) for item in _items(value)]
    return [*((str(key), value) for key, value in raw.items()), *inner]


ADAPTER = Adapter("transformers", find, identify, rebuild)
