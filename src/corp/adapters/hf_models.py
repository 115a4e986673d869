"""transformers models by folder or hub id: loading them, and their tokenizer or image preprocessing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import logging

from corp.adapters import hub
from corp.adapters.hf import refuse_deep
from corp.adapters.shell import without_weights
from corp.errors import DataError, ModelError
from corp.io.files import MAX_JSON_BYTES
from corp.measure.cost import count_params

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json")
PREPROCESSING_FILES = ("preprocessor_config.json", "processor_config.json")
SMALL = (".json", ".txt", ".model", ".jinja")  # files beside the weights
PARAMETERS_PER_BYTE = 8  # no quantisation packs more
CAUSAL, ENCODER, IMAGE, OTHER = "causal", "encoder", "image", "other"
POOLER = "pooler."  # encoders are often saved without it; nothing that is pruned or measured depends on it


def create(name: str, *, pretrained: bool = True) -> nn.Module:
    """The model in the folder (or under the hub id) `name`, in eval mode, in the checkpoint's dtype.

    The class is the one that its config names, otherwise a causal language model or a plain encoder, depending on
    the family. No code of the checkpoint is ever run, and only safetensors are read. Without `pretrained`, a folder
    without weights is built with random ones.
    """
    _check_folder(name)
    config = _load(AutoConfig, name, "config")
    refuse_deep(config.to_dict(), name)
    candidates = _classes(config, name)
    if not pretrained and not _has_weights(name):
        with quiet():
            return _from_config(candidates[0], config).eval()
    _check_weights(name)
    _check_sizes(candidates[0], config, name)
    problems = []
    for cls in candidates:
        model, info = _load(cls, name, "weights", dtype="auto", use_safetensors=True, output_loading_info=True)
        missing = sorted(key for key in info["missing_keys"] if POOLER not in key)
        if not missing:
            ready: nn.Module = model.eval()
            return ready
        problems.append(f"{type(model).__name__} lacks {len(missing)} tensors, such as {missing[0]}")
    raise ModelError(f"the weights of {name} are not complete: {'; '.join(problems)}")


def shells(name: str) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """The model in the folder `name` without its weights, in every possible class, and the recorded dtype."""
    _check_folder(name)
    config = _load(AutoConfig, name, "config")
    refuse_deep(config.to_dict(), name)
    for cls in _classes(config, name):
        with quiet(), without_weights(), no_init_weights():
            made: Any = _from_config(cls, config)
            made.tie_weights()
        yield made, getattr(config, "dtype", None)


def tensor_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """The checkpoint's name of each of the model's tensors; transformers saves many models under older names."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    state, prefix = model.state_dict(), getattr(model, "base_model_prefix", "")
    every = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [one for one in every if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in every if isinstance(one, loading.WeightConverter)]
    found = {}
    for key in sorted(keys, key=loading.dot_natural_key):
        name, computed = loading.rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, computed = key, None
        if computed is None:  # otherwise several tensors make one, which cannot be copied
            found[name] = key
    return found


def tokenizer(name: str) -> Any:
    """The tokenizer of the folder or hub id."""
    if hub.is_path(name) and not Path(name).is_dir():
        raise DataError(f"there is no folder {name} with a tokenizer; give its folder as tokenizer=FOLDER")
    # Without files, transformers makes an empty tokenizer, which turns every text into nothing.
    if hub.is_path(name) and not any((Path(name) / file).is_file() for file in TOKENIZER_FILES):
        raise DataError(f"{name} has no tokenizer ({TOKENIZER_FILES[0]}); give its folder as tokenizer=FOLDER")
    try:
        _check_small_files(name)
        return _load(AutoTokenizer, name, "tokenizer")
    except ModelError as error:
        raise DataError(f"{error}; give the tokenizer's folder as tokenizer=FOLDER") from error


def kind_of(model: nn.Module) -> str:
    """The kind of model by input and output: CAUSAL, ENCODER (texts to hidden states), IMAGE or OTHER."""
    if not isinstance(model, transformers.PreTrainedModel):
        return OTHER
    if model.main_input_name == "pixel_values":
        return IMAGE
    if (
        model.main_input_name != "input_ids"
        or model.config.is_encoder_decoder
        or hasattr(model.config, "vision_config")
    ):
        return OTHER
    return CAUSAL if model.can_generate() else ENCODER


def classes(model: nn.Module) -> int:
    """The number of classes of an image model; 0 for a backbone."""
    assert isinstance(model, transformers.PreTrainedModel)
    return int(model.config.num_labels) if type(model).__name__.endswith("ForImageClassification") else 0


def context_length(model: nn.Module, tokenizer: Any = None) -> int | None:
    """How many tokens a sequence may have; None if neither the model nor the tokenizer says."""
    config = getattr(model, "config", None)
    known = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    known.append(getattr(tokenizer, "model_max_length", None))
    for name, module in model.named_modules():
        # RoBERTa and similar models number positions from after the padding index.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            known.append(module.num_embeddings - module.padding_idx - 1)
    # Tokenizers without a limit report something like 1e30; for relative positions it is -1 or 0.
    sensible = [int(length) for length in known if isinstance(length, int | float) and 1 < length < 1 << 30]
    return min(sensible, default=None)


class Preprocessing:
    """An image processor, as a transform of one image into its pixel_values (3, h, w)."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor

    def __call__(self, image: Image.Image) -> Tensor:
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    def __str__(self) -> str:
        settings = json.loads(self.processor.to_json_string())
        return json.dumps({key: value for key, value in settings.items() if value is not None}, sort_keys=True)


def preprocessing(name: str) -> Callable[[Image.Image], Tensor]:
    """The image preprocessing of the folder or hub id (by Pillow and numpy, so the same on every machine)."""
    try:
        _check_small_files(name)
        return Preprocessing(_load(AutoImageProcessor, name, "image preprocessing", backend="pil"))
    except ModelError as error:
        raise DataError(
            f"{error}; add a preprocessor_config.json, which describes how images are prepared, to its folder"
        ) from error


def _classes(config: Any, name: str) -> list[Any]:
    """The classes to try, best first; the config of a bare backbone's weights may name a class with a head."""
    named = _named(config)
    family = type(config)
    causal = family in MODEL_FOR_CAUSAL_LM_MAPPING and family not in MODEL_FOR_MASKED_LM_MAPPING
    general = AutoModelForCausalLM if causal else AutoModel
    return [general] if named is None else [named, AutoModel]


def _named(config: Any) -> Any:
    """The public class that config.architectures names, if it is one."""
    named = config.architectures
    for architecture in named if isinstance(named, list | tuple) else ():
        cls = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            return cls
    return None


def _check_folder(name: str) -> None:
    hub.require_known(name)
    _check_small_files(name)
    if hub.is_path(name) and not (Path(name) / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so transformers' from_pretrained cannot load it")


def _check_small_files(name: str) -> None:
    """Refuse configs, vocabularies and templates that are too large, because they are read whole."""
    for path in Path(name).iterdir() if hub.is_path(name) and Path(name).is_dir() else ():
        if path.suffix in SMALL and path.is_file() and path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} has {path.stat().st_size} bytes; corp reads at most {MAX_JSON_BYTES}")


def _check_sizes(cls: Any, config: Any, name: str) -> None:
    """Refuse a config that describes far more than the weights contain, before anything of that size is allocated."""
    held = sum(path.stat().st_size for path in Path(name).glob("*.safetensors")) if hub.is_path(name) else 0
    try:
        with quiet(), torch.device("meta"):
            wanted = count_params(_from_config(cls, config)) if held else 0
    except Exception:  # loading reports what is wrong with this config
        return
    if wanted > PARAMETERS_PER_BYTE * held:
        raise ModelError(
            f"the config of {name} describes {wanted:,} parameters, but its weights have {held:,} bytes; the file "
            f"is incomplete, or one of them belongs to another model"
        )


def _from_config(cls: Any, config: Any) -> nn.Module:
    made: nn.Module = cls._from_config(config) if hasattr(cls, "_from_config") else cls.from_config(config)
    return made


def _has_weights(name: str) -> bool:
    return not hub.is_path(name) or any(Path(name).glob("*.safetensors"))


def _check_weights(name: str) -> None:
    if _has_weights(name):
        return
    if any(Path(name).glob("*.bin")):
        raise ModelError(f"{name} has its weights only as pickle (.bin), which corp does not read: {_convert(name)}")
    raise ModelError(f"{name} has no weights (*.safetensors)")


def _convert(name: str) -> str:
    return (
        'if you trust them, convert them once: python -c "from transformers import AutoModel as M; '
        f"M.from_pretrained('{name}').save_pretrained('NEW')\" (AutoModelForCausalLM for a language model), "
        "copy the tokenizer's files beside them, and use hf:NEW"
    )


def _load(auto: Any, name: str, what: str, **kwargs: Any) -> Any:
    """from_pretrained, from local files first, then (for a hub id) from the hub."""
    places = (True,) if hub.is_path(name) else (True, False)
    problem: Exception = ConnectionError("offline")
    for local in places:
        if not local and not hub.reachable(hub.endpoint()):
            break  # the hub's client would try six times
        try:
            with quiet():
                return auto.from_pretrained(name, local_files_only=local, trust_remote_code=False, **kwargs)
        except Exception as error:  # the hub, the network, files and configs: transformers raises many kinds
            problem = error
    raise ModelError(_reason(name, what, problem)) from problem


def _reason(name: str, what: str, error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if "trust_remote_code" in text:
        return f"{name} comes with its own code, which corp does not run; it loads only transformers' own classes"
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return f"transformers {transformers.__version__} does not know the architecture of {name}: {text[:200]}"
    if not hub.is_path(name) and not hub.reachable(hub.endpoint()):
        return str(hub.missing(name))
    if what == "weights" and "safetensors" in text:
        return f"{name} has no weights as safetensors: {_convert(name)}"
    return f"the {what} of {name} cannot be loaded: {text[:300]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' own reports and bars; what matters is checked here and reported in one line."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
