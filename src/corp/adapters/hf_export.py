"""Pruned transformers models as transformers itself saves and loads them."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import load_file
from torch import nn

from corp.adapters.examples import inputs
from corp.adapters.hf import rebuild
from corp.adapters.hf_models import PREPROCESSING_FILES, TOKENIZER_FILES, quiet
from corp.adapters.registry import Library, find_sites
from corp.errors import ModelError, StorageError

# Names of the MLP width in configs. Their effect in a given model is found by trial.
WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim")
RATIO = "mlp_ratio"  # ratio of the MLP's width to the model's, a whole number (DINOv2)
BIASES = ("mlp_bias", "enable_bias")
COMPANIONS = (
    *TOKENIZER_FILES,
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "normalizer.json"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model"),
    *PREPROCESSING_FILES,
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json"),
)
HF = "hf:"


def resize(identity: dict[str, Any], widths: dict[str, int], biases: bool) -> dict[str, Any]:
    """The config of the model with these MLP widths, and biases in its MLPs if it supports them."""
    dense, made = _widths(identity), copy.deepcopy(identity)
    widths = {**dense, **widths}  # MLPs that were refused keep their width
    for place, key in _fields(made["config"], (*WIDTHS, RATIO)):
        governed = _governed(made, place, key)
        wanted = {widths[site] for site in governed}
        if len(wanted) > 1:
            raise StorageError(
                f"the MLPs are {min(wanted)} to {max(wanted)} channels wide, but {identity['class']} has one {key} for "
                "all of them; use profile='compat', or prune all MLPs alike (allocate='uniform', no skip or override)"
            )
        if governed and wanted != {dense[governed[0]]}:
            place[key] = _value(key, place[key], wanted.pop(), dense[governed[0]])
    if biases:
        for place, key in _fields(made["config"], BIASES):
            place[key] = True
    odd = [site for site, width in _widths(made).items() if width != widths[site]]
    if odd:
        raise StorageError(
            f"the config of {identity['class']} cannot say that {odd[0]} has {widths[odd[0]]} of "
            f"{dense[odd[0]]} channels; use profile='compat'"
        )
    return made


def resize_heads(
    identity: dict[str, Any], width: int, rope: dict[str, Any] | None
) -> tuple[dict[str, Any], float] | None:
    """The config of the model with heads of this width, if its attention reads `head_dim` (ViT, Llama).

    Rotary heads also need the parameters `rope` of the kept pairs.
    """
    made = copy.deepcopy(identity)
    made["config"]["head_dim"] = width
    if rope is not None:
        made["config"]["rope_parameters"] = rope
    try:
        with torch.device("meta"):
            dense, narrow = (find_sites(rebuild(copy.deepcopy(one))) for one in (identity, made))
    except ModelError:
        return None
    widths = {site.width for site in narrow.attention} | {site.width for site in narrow.values}
    if widths != {width} or any(bool(site.rotary) != (rope is not None) for site in narrow.attention):
        return None
    # A pruned model keeps the dense one's scale. Sites without positions do not record theirs: it is head_dim^-1/2.
    before, after = dense.attention[0], narrow.attention[0]
    return made, before.scale / after.scale if rope else math.sqrt(width / before.width)


def _fields(config: dict[str, Any], names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """The occurrences of such a name in a config or in the configs inside it."""
    for key, value in list(config.items()):
        if isinstance(value, dict):
            yield from _fields(value, names)
        elif key in names:
            yield config, key


def _governed(identity: dict[str, Any], place: dict[str, Any], key: str) -> list[str]:
    """The MLPs whose width changes with the field; a config may have fields that nothing reads."""
    old = place[key]
    if isinstance(old, bool) or not isinstance(old, int | None) or (key == RATIO and old is None):
        return []
    before = _widths(identity)
    place[key] = (old or 0) + 1 if key == RATIO else 16 if old == 8 else 8
    try:
        after = _widths(identity)
    except ModelError:  # then it is not a width
        return []
    finally:
        place[key] = old
    return [site for site in before if after[site] != before[site]]


def _value(key: str, old: Any, width: int, dense: int) -> int:
    if key != RATIO:
        return width
    return int(old) * width // dense  # rounding shows in the resulting widths


def _widths(identity: dict[str, Any]) -> dict[str, int]:
    with torch.device("meta"):
        return {site.name: site.width for site in find_sites(rebuild(copy.deepcopy(identity))).mlp}


def write(model: nn.Module, _identity: dict[str, Any], folder: Path) -> None:
    """Write config and safetensors by save_pretrained, and the unchanged generation config."""
    wide: Any = model
    settings = wide.generation_config if wide.can_generate() else None
    try:
        with quiet():
            if settings is not None:  # published ones often have values that save_pretrained refuses to write
                wide.generation_config = transformers.GenerationConfig()
            wide.save_pretrained(folder)
            if settings is not None:
                settings.to_json_file(folder / "generation_config.json")
    except OSError:
        raise
    except Exception as error:  # the library's own checks, of many kinds
        raise StorageError(f"transformers cannot save the {type(model).__name__}: {error}") from error


def read(identity: dict[str, Any], folder: Path, dtype: torch.dtype) -> nn.Module:
    """from_pretrained, with every tensor accounted for."""
    cls: Any = getattr(transformers, identity["class"])
    try:
        with quiet():
            model, info = cls.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:
        raise StorageError(f"transformers cannot load what it saved of {identity['class']}: {error}") from error
    odd = sorted(map(str, [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]))
    if odd:
        raise StorageError(f"transformers misses or does not know {len(odd)} of the tensors it saved, such as {odd[0]}")
    kernel = identity.get("attention")
    if kernel is not None:  # the same arithmetic as in the model that it is compared with
        model.set_attn_implementation(kernel)
    loaded: nn.Module = model.eval()
    return loaded


def read_deci(folder: Path, dtype: torch.dtype) -> nn.Module:
    """A DeciLM folder as vLLM interprets it: a Llama whose layers have the MLP widths of `block_configs`."""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    fields = transformers.LlamaConfig().to_dict().keys() & raw.keys() - {"model_type", "architectures", "torch_dtype"}
    config = transformers.LlamaConfig(**{key: raw[key] for key in fields})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        for layer, block in zip(model.model.layers, raw["block_configs"], strict=True):
            config.intermediate_size = block["ffn"]["intermediate_size"]
            layer.mlp = type(layer.mlp)(config)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not saved
    state = load_file(folder / "model.safetensors")
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    loaded: nn.Module = model.to(dtype).eval()
    return loaded


def companions(sources: list[str], folder: Path) -> list[str]:
    """Copy tokenizer and preprocessing files from the first source that has any; returns their names."""
    for source in sources:
        found = {name: path for name in COMPANIONS if (path := _companion(source.removeprefix(HF), name))}
        for name, path in found.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        if found:
            return list(found)
    return []


def _companion(source: str, name: str) -> Path | None:
    """The file in a folder, or among the downloaded files of a hub id."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        path = folder / name
        # Links may lead out of a folder only in the hub's cache, which stores its files that way.
        inside = path.resolve().is_relative_to(folder.resolve()) or folder.resolve().parent.name == "snapshots"
        return path if path.is_file() and inside else None
    try:
        cached = try_to_load_from_cache(source, name)
    except ValueError:  # not a hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def call(identity: dict[str, Any], folder: str) -> str:
    name = identity["class"]
    return f"from transformers import {name}\n\nmodel = {name}.from_pretrained({folder!r})"


LIBRARY = Library("transformers", resize, write, read, inputs, companions, call, resize_heads)
