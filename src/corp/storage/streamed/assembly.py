"""From finished blocks to the folder that corp.load opens, without holding more than one tensor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.adapters.shell import placeholder, replace_parameters
from corp.io.files import tensor_header, writing
from corp.planning.plan import Plan
from corp.sites import Sites
from corp.storage.streamed.presence import Presence
from corp.storage.streamed.weights import Place, Weights, contents
from corp.storage.tying import saved_state
from corp.surgery.apply import match, set_history, shrink


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
    places: dict[str, Place] = {name: held.get(name) or dense.weights.places[name] for name in saved_state(smaller)}
    set_history(smaller, (plan,))
    presence = Presence(smaller, Weights(places, dtype, device), dense.units)
    presence.load_buffers()
    return presence


def write_streamed(path: Path, model: nn.Module, weights: Weights) -> None:
    """A safetensors file of the model's tensors, read and written one by one; the same bytes as safetensors writes."""
    state = model.state_dict()
    kinds = {name: weights.dtype if state[name].is_floating_point() else state[name].dtype for name in weights.places}
    order, header = tensor_header({name: (kind, state[name].shape) for name, kind in kinds.items()})
    with writing(path), path.open("wb") as file:
        file.write(header)
        for _, tensor in weights.each(order):
            file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
