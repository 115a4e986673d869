"""What a batch is, how it is passed to a model, and how many there are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from corp.calibration.hooks import uncompiled
from corp.calibration.threads import shared
from corp.errors import DataError

MOST_NUMBERS = 2**28  # in one sample: a gigabyte in float32

PLACES = "logits_to_keep"  # the argument of transformers' language models for the tokens whose logits are computed

Forward: TypeAlias = Callable[[nn.Module, Any], Any]


def run(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """tensor -> model(x); dict -> model(**x); of a tuple or list only the first element is used, never the labels."""
    if forward is not None:
        return forward(model, batch)
    batch = inputs_of(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Tensor):
        return model(batch)
    raise DataError(
        f"a batch is a tensor, a dict, or a tuple whose first element is one; got {type(batch).__name__}. "
        "For anything else pass forward=lambda model, batch: ..."
    )


def feed(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run the model on a batch after moving it to the model's device; a `forward` function moves batches itself."""
    return run(model, move(batch, *placement(model)) if forward is None else batch, forward)


def takes_places(model: nn.Module, batch: Any) -> bool:
    """Whether the model can compute the logits of some of the batch's tokens only; a loss needs all of them."""
    batch = inputs_of(batch)
    if not isinstance(batch, Mapping) or PLACES in batch or batch.get("labels") is not None:
        return False
    return PLACES in inspect.signature(model.forward).parameters


def require_runs(model: nn.Module, batch: Any, forward: Forward | None = None, name: str = "the first batch") -> Any:
    """The model's output on a batch; refuses one that the model does not run on."""
    try:
        with torch.no_grad(), evaluating(model), uncompiled():
            return feed(model, batch, forward)
    except (DataError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from the model's own code
        raise DataError(
            f"the model does not run on {name} ({described(batch)}): {type(error).__name__}: {error}. "
            "A tensor becomes model(x), a dict model(**x); for anything else pass forward=lambda model, batch: ..."
        ) from error


def described(batch: Any) -> str:
    """A description of a batch by its shapes."""
    if isinstance(batch, Tensor):
        return f"a {batch.dtype} tensor {tuple(batch.shape)}".replace("torch.", "")
    if isinstance(batch, Mapping):
        return "a dict of " + ", ".join(f"{name}: {described(value)}" for name, value in batch.items())
    if isinstance(batch, tuple | list) and batch:
        return f"a {type(batch).__name__} that begins with {described(batch[0])}"
    return f"a {type(batch).__name__}"


def evaluating(model: nn.Module) -> AbstractContextManager[None]:
    """Eval mode within this context; afterwards every module is in its previous mode."""

    def change(module: nn.Module) -> Callable[[], None]:
        mode, module.training = module.training, False
        return lambda: setattr(module, "training", mode)

    return shared({("mode", id(module)): partial(change, module) for module in model.modules()})


def without_cache(*loaded: nn.Module) -> AbstractContextManager[None]:
    """Turn off the key-value caches of language models, also of those inside: gigabytes that only generation needs."""

    def change(config: Any) -> Callable[[], None]:
        was, config.use_cache = config.use_cache, False
        return lambda: setattr(config, "use_cache", was)

    configs = [config for model in loaded for config in _configs(model).values()]  # also those of another thread's use
    return shared({("cache", id(config)): partial(change, config) for config in configs})


def keep_cache_setting(smaller: nn.Module, dense: nn.Module) -> None:
    """Give a copy that was made inside `without_cache` the dense model's own settings."""
    own = _configs(dense)
    for name, config in _configs(smaller).items():
        if name in own:
            config.use_cache = own[name].use_cache


def _configs(model: nn.Module) -> dict[str, Any]:
    """The configurations that say whether a cache is used, by the names of their modules."""
    every = {name: getattr(module, "config", None) for name, module in model.named_modules()}
    return {name: config for name, config in every.items() if hasattr(config, "use_cache")}


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and dtype of the model's first parameter."""
    first = next(model.parameters(), torch.empty(0))
    return first.device, first.dtype


def inputs_of(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def move(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The batch on the model's device, floating-point inputs in the model's dtype."""
    batch = inputs_of(batch)
    if isinstance(batch, Tensor):
        return batch.to(device, dtype) if batch.is_floating_point() else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: move(value, device, dtype) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return batch


def size_of(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor; 1 if unknown."""
    batch = inputs_of(batch)
    values = list(batch.values()) if isinstance(batch, Mapping) else [batch]
    first = next((value for value in values if isinstance(value, Tensor) and value.dim() > 0), None)
    return 1 if first is None else len(first)


def first_samples(batch: Any, count: int) -> Any:
    """The first `count` samples of a batch; the whole batch if its tensors differ in length."""
    batch = inputs_of(batch)
    parts = batch if isinstance(batch, Mapping) else {"": batch}
    if any(not isinstance(part, Tensor) or part.dim() == 0 or len(part) != size_of(batch) for part in parts.values()):
        return batch
    some = {key: part[:count] for key, part in parts.items()}
    return some if isinstance(batch, Mapping) else some[""]


def enumerate_batches(batches: Iterable[Any], wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, Any]]:
    """(index, index of its first sample, batch) of the wanted batches.

    Data that can make single batches (with `indexed`, as in data.images) skips the others.
    """
    indexed = getattr(batches, "indexed", None)
    if indexed is not None:
        yield from indexed(wanted)
        return
    start = 0
    for index, batch in enumerate(batches):
        if wanted(index):
            yield index, start, batch
        start += size_of(batch)


def first_batch(batches: Iterable[Any]) -> Any:
    """The first batch, made alone if the data supports that; None if there is none."""
    return next((batch for _, _, batch in enumerate_batches(batches, lambda index: index == 0)), None)


def count_samples(batches: Iterable[Any]) -> int | None:
    """How many samples there are; None if that is unknown before they are read."""
    known = getattr(batches, "samples", None)
    if isinstance(known, int):
        return known
    if isinstance(batches, list | tuple):
        return sum(map(size_of, batches))
    dataset = getattr(batches, "dataset", None)  # a torch DataLoader
    if isinstance(dataset, Sized):
        return len(dataset)
    return None


def describe(batch: Any) -> Any:
    """Shapes and dtypes of ONE sample of the batch, as JSON; None if it does not consist of tensors."""
    batch = inputs_of(batch)
    if isinstance(batch, Tensor):
        return {"shape": [1, *batch.shape[1:]], "dtype": str(batch.dtype).removeprefix("torch.")}
    if isinstance(batch, Mapping) and all(isinstance(value, Tensor) for value in batch.values()):
        return {"fields": {str(key): describe(value) for key, value in batch.items()}}
    return None


def is_description(raw: Any, *, inside: bool = False) -> bool:
    """Whether this may be an output of `describe`; checked for files before anything is allocated."""
    if raw is None:
        return not inside
    if not isinstance(raw, dict):
        return False
    if set(raw) == {"fields"} and not inside:
        return isinstance(raw["fields"], dict) and all(is_description(v, inside=True) for v in raw["fields"].values())
    shape, dtype = raw.get("shape"), raw.get("dtype")
    if set(raw) != {"shape", "dtype"} or not isinstance(shape, list) or not isinstance(dtype, str):
        return False
    sizes = all(type(size) is int and 0 <= size <= MOST_NUMBERS for size in shape)
    return sizes and math.prod(shape) <= MOST_NUMBERS and isinstance(getattr(torch, dtype, None), torch.dtype)


def example(description: Any, device: torch.device) -> Any:
    """A batch of zeros that fits the description; masks are ones, so that nothing is hidden."""
    if "fields" in description:
        fields = {key: example(value, device) for key, value in description["fields"].items()}
        return {key: value.fill_(1) if key.endswith("attention_mask") else value for key, value in fields.items()}
    return torch.zeros(description["shape"], dtype=getattr(torch, description["dtype"]), device=device)
