"""timm models by name: building them, loading weights, and their preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from corp.adapters import hub, timm_names
from corp.adapters.shell import without_weights
from corp.errors import DataError, ModelError, first_line


def create(
    name: str, weights: str | Path | None = None, *, pretrained: bool = False, any_size: bool = False
) -> nn.Module:
    """The timm model `name` in eval mode, with weights from a file, from the hub (`pretrained`), or random.

    With `any_size` it accepts images of any size that is a multiple of its patches, and so does its pruned copy.
    """
    require_known(name)
    if pretrained and weights is None:
        _require_weights(name)
    try:
        more = {"dynamic_img_size": True} if any_size else {}
        model: nn.Module = timm.create_model(name, pretrained=pretrained and weights is None, **more)
    except TypeError as error:
        raise ModelError(f"{name} takes images of one size only: {error}") from error
    except Exception as error:  # problems with hub, network or tag: timm raises many kinds
        reason = str(error).rstrip(". ")
        raise ModelError(f"timm cannot make {name!r}: {reason}. Pass the weights as a file: weights=FILE") from error
    if weights is not None:
        load_weights(model, Path(weights), name)
    return model.eval()


def require_known(name: str) -> None:
    """Refuse a name that timm does not know, and suggest similar ones."""
    if not timm.is_model(name.partition(".")[0]):
        raise timm_names.unknown(name, timm.list_models())


def _require_weights(name: str) -> None:
    """Refuse pretrained weights that are neither on this machine nor reachable, before timm tries for a minute."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    place = getattr(config, "hf_hub_id", None)
    if place is not None:
        hub.require_weights(name, hub.cached(place))


def from_folder(folder: Path) -> nn.Module:
    """A folder in timm's own format (config.json, model.safetensors), as corp export writes it."""
    try:
        model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    except Exception as error:  # timm raises many kinds
        raise ModelError(f"timm cannot load {folder}: {error}") from error
    return model.eval()


def shell(folder: Path) -> nn.Module:
    """The model of such a folder without its weights."""
    try:
        with without_weights():
            model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False)
    except Exception as error:  # timm raises many kinds
        raise ModelError(f"timm cannot build {folder}: {error}") from error
    return model


def load_weights(model: nn.Module, path: Path, name: str = "") -> None:
    """Load a .safetensors file or a .pth (weights only, nothing is executed) that fits the architecture exactly.

    The model gets the dtype of the file, if all its tensors have the same one. `name` is the model's, for the message.
    """
    state = read_state(path)
    expected = model.state_dict()
    missing, unknown = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
    wrong = [name for name in expected if name in state and state[name].shape != expected[name].shape]
    if missing or unknown or wrong:
        details = [
            f"{what}: {len(names)} (such as {names[0]})"
            for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", wrong))
            if names
        ]
        fitting = _fitting(state, name)
        remedy = (
            f"its tensors fit {fitting}: give that name if it is one"
            if fitting
            else "give the model that it was saved from"
        )
        raise ModelError(f"{path} does not fit {name or type(model).__name__}; {remedy}. Tensors {'; '.join(details)}")
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.load_state_dict(state)


def _fitting(state: dict[str, Tensor], name: str) -> str | None:
    """A model of the same family whose tensors have these names and shapes."""
    shapes = {key: tensor.shape for key, tensor in state.items()}
    for other in timm.list_models(f"{name.partition('_')[0]}_*") if name else []:
        with torch.device("meta"), suppress(Exception):  # models that cannot be built this way are not suggested
            if {key: tensor.shape for key, tensor in timm.create_model(other).state_dict().items()} == shapes:
                return str(other)
    return None


def read_state(path: Path) -> dict[str, Tensor]:
    timm_names.require_weights_file(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, EOFError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # torch.load refuses pickles with code by an UnpicklingError
        raise ModelError(
            f"{path} holds more than weights, or is damaged (no pickle is run): {first_line(error)}; save "
            "model.state_dict() alone, best as .safetensors"
        ) from error
    for key in ("model", "state_dict"):  # the usual keys of training scripts
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ModelError(f"{path} is not a state dict: expected names mapped to tensors")
    return {str(name): tensor for name, tensor in state.items()}


def preprocessing(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    """The transform that timm prescribes for evaluating this model."""
    config = resolve_data_config({}, model=model)
    transform = create_transform(**config, is_training=False)
    if not callable(transform):
        raise DataError(f"timm gives no transform for {type(model).__name__}")
    checked: Callable[[Image.Image], Tensor] = transform
    return checked
