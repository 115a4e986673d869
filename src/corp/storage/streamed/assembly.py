"""From finished blocks to the folder that corp.load opens, without holding more than one tensor."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp.adapters.shell import placeholder, replace_parameters
from corp.io.files import cannot_write
from corp.planning.plan import Plan
from corp.sites import Sites
from corp.storage.streamed.presence import Presence
from corp.storage.streamed.weights import Place, Weights, contents
from corp.storage.tying import tied_names
from corp.surgery.apply import match, set_history, shrink

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}


def pruned_shell(dense: Presence, sites: Sites, plan: Plan, shards: Sequence[Path]) -> Presence:
    """The smaller model: what is no block is the dense one's own, blocks come from their shards when they run."""
    shared: dict[int, Any] = {id(t): t for t in chain(dense.model.parameters(), dense.model.buffers())}
    smaller = copy.deepcopy(dense.model, shared)  # tensors in the memo are not copied
    dtype, device = dense.weights.dtype, dense.weights.device
    for group in match(sites, plan):  # one by one: what is cut out of a placeholder takes memory until it is one again
        shrink(smaller, sites, replace(plan, sites=tuple(site_plan for _, site_plan in group)))
        made = [p for p in smaller.parameters() if id(p) not in shared]
        replace_parameters(smaller, {id(p): placeholder(p, dtype, device) for p in made})
        shared |= {id(p): p for p in smaller.parameters()}
    held = contents(shards)
    places: dict[str, Place] = {name: held.get(name) or dense.weights.places[name] for name in saved_names(smaller)}
    set_history(smaller, (plan,))
    presence = Presence(smaller, Weights(places, dtype, device), dense.units)
    presence.load_buffers()
    return presence


def saved_names(model: nn.Module) -> list[str]:
    """The names under which a model's tensors are saved, tied ones once."""
    tied = tied_names(model)
    return [name for name in model.state_dict() if name not in tied]


def write_streamed(path: Path, model: nn.Module, weights: Weights) -> None:
    """A safetensors file of the model's tensors, read and written one by one; the same bytes as safetensors writes."""
    state = model.state_dict()
    kinds = {name: weights.dtype if state[name].is_floating_point() else state[name].dtype for name in weights.places}
    order = sorted(kinds, key=lambda name: (-kinds[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + state[name].numel() * kinds[name].itemsize
        header[name] = {"dtype": DTYPES[kinds[name]], "shape": list(state[name].shape), "data_offsets": [start, end]}
    try:
        _write(path, header, (tensor for _, tensor in weights.each(order)))
    except OSError as error:
        raise cannot_write(path, error) from error


def _write(path: Path, header: dict[str, Any], tensors: Iterable[Tensor]) -> None:
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
