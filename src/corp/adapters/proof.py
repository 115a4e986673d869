"""Trials of claims: pruning relies on a symmetry of the model, and a symmetry can be tested.

Random numbers replace the outputs of the sites' layers, once unchanged and once transformed: channels permuted and half
of them changed (MLP), values mapped and mapped back (V/O), queries and keys mapped by inverse transposes (Q/K; after
their norms, if they have any), or, under rotary positions, every pair rotated and scaled. The input of the consuming
layer must be the same. Modules with weights for every channel get each channel in its own place, as if they were
permuted too. The weights of the sites are neither changed nor used, so the outcome depends on the architecture alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from corp.adapters.linears import mixes
from corp.adapters.symmetry import (
    Change,
    Changing,
    compared,
    made_by,
    noise,
    permuted,
    sketch,
    transformed,
    undone,
)
from corp.calibration.batches import evaluating, without_cache
from corp.calibration.hooks import input_of, removing, uncompiled, with_input, without_fast_path
from corp.calibration.kernel import Watched, watching_kernel
from corp.calibration.threads import here
from corp.sites import AttentionSite, MLPSite, Rows, Site, features_last

Run = Callable[[], Any]


def tolerance(dtype: torch.dtype) -> float:
    """The largest relative difference between two computations that agree; wrong claims differ by a tenth or more."""
    return float(min(0.1, max(1e-5, 3 * torch.finfo(dtype).eps ** 0.5)))


@dataclass
class Trial:
    """One pass: the inputs of consuming layers (`z`) and attention kernels (`kernels`: shapes and scale), by name.

    `made` are the layers that were called, with the shape of their outputs, and `ran` the attentions. `dtypes` are
    those of the activations, which under autocast differ from the model's. `passing` sketches other layers' inputs.
    """

    z: dict[str, list[Tensor]] = field(default_factory=dict)
    kernels: dict[str, tuple[torch.Size, torch.Size, float]] = field(default_factory=dict)
    made: dict[str, torch.Size] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    passing: dict[str, list[Tensor]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)

    @property
    def limit(self) -> float:
        """The largest relative difference to another pass that counts as agreement."""
        return max(map(tolerance, self.dtypes or {torch.get_default_dtype()}))


@dataclass(frozen=True)
class Places:
    """The layers whose outputs are random in a trial, those whose inputs are compared, and attentions by the latter.

    An attention without a known output projection is compared at its output. Modules `passed` on the way from the
    first to the second are compared too, but not replaced. `others` are all other layers: their inputs must not change.
    """

    makers: tuple[str, ...]
    takers: tuple[str, ...]
    ends: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def places_of(model: nn.Module, sites: Sequence[Site], downs: dict[str, str]) -> Places:
    makers = [rows.module for site in sites for rows in made_by(site)]
    ends = [s.attention for s in sites if isinstance(s, AttentionSite) and s.attention not in downs]
    takers = [*(s.down for s in sites if not isinstance(s, AttentionSite)), *downs.values()]
    attentions = [s.attention for s in sites if not isinstance(s, MLPSite)]
    passed = [name for s in sites if isinstance(s, MLPSite) for name in s.between]
    watched = {*takers, *passed}
    others = [name for name, module in model.named_modules() if mixes(module) and name not in watched]
    return Places(*(tuple(dict.fromkeys(names)) for names in (makers, takers, ends, attentions, passed, others)))


def attempt(
    model: nn.Module, run: Run, places: Places, sites: Sequence[Site] = (), change: Changing = transformed
) -> Trial:
    """Run the model with random numbers for what its layers make, changed for `sites` by `change`."""
    trial = Trial()
    changes: dict[str, list[tuple[Rows, Change]]] = {}
    for site in sites:
        for rows, new in change(site):
            changes.setdefault(rows.module, []).append((rows, new))
    handles = []
    for name in places.makers:
        handles.append(
            model.get_submodule(name).register_forward_hook(here(_inject(name, trial, changes.get(name, []))))
        )
    for name in places.passed:
        handles.append(model.get_submodule(name).register_forward_pre_hook(here(_pass(name, trial)), with_kwargs=True))
    for site, name in [(s, n) for s in sites if isinstance(s, MLPSite) for n in s.between]:
        handles.append(model.get_submodule(name).register_forward_pre_hook(here(_back(site)), with_kwargs=True))
        handles.append(model.get_submodule(name).register_forward_hook(here(_forth(site))))
    for name in places.others:
        note_it = here(_sketch(name, trial))
        handles.append(model.get_submodule(name).register_forward_pre_hook(note_it, with_kwargs=True))
    for name in places.takers:
        handles.append(model.get_submodule(name).register_forward_pre_hook(here(_take(name, trial)), with_kwargs=True))
    for name in places.attentions:
        note = here(lambda _m, _args, name=name: trial.ran.add(name))
        handles.append(model.get_submodule(name).register_forward_pre_hook(note))
    for name in places.ends:
        handles.append(model.get_submodule(name).register_forward_hook(here(_end(name, trial))))
    watched = [Watched(s, _kernel(s.attention, trial)) for s in sites if isinstance(s, AttentionSite)]
    with ExitStack() as stack:
        for context in (torch.no_grad(), evaluating(model), without_cache(model), without_fast_path(), uncompiled()):
            stack.enter_context(context)
        stack.enter_context(removing(handles))
        stack.enter_context(watching_kernel(model, watched))
        stack.enter_context(_quiet_randomness(model))
        trial.output = list(tensors(run()))
    return trial


@contextmanager
def _quiet_randomness(model: nn.Module) -> Iterator[None]:
    """Make every pass draw the same numbers, and restore the user's generators afterwards."""
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        # torch.manual_seed formats a stack trace for every kind of device, in use or not.
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(0)
        yield


def _inject(name: str, trial: Trial, changes: list[tuple[Rows, Change]]) -> Any:
    calls = 0

    def after(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        trial.made[name] = output.shape
        trial.dtypes.add(output.dtype)
        made = noise(f"{name}/{calls}", output)
        x = features_last(module, made)
        for rows, change in changes:
            x[..., rows.index] = change(x[..., rows.index])
        return made

    return after


def _take(name: str, trial: Trial) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen, x = trial.z.setdefault(name, []), input_of(args, kwargs)
        trial.dtypes.add(x.dtype)
        seen.append(features_last(module, x.detach()).clone())
        return with_input(args, kwargs, noise(f"{name}/in/{len(seen)}", x))

    return before


def _pass(name: str, trial: Trial) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        trial.z.setdefault(name, []).append(features_last(module, input_of(args, kwargs).detach()).clone())

    return before


def _sketch(name: str, trial: Trial) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = input_of(args, kwargs)
        if isinstance(x, Tensor) and x.is_floating_point():
            trial.passing.setdefault(name, []).append(sketch(name, features_last(module, x.detach())))

    return before


def _back(site: MLPSite) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_input(args, kwargs, in_place(module, input_of(args, kwargs), lambda x: undone(site, x)))

    return before


def _forth(site: MLPSite) -> Any:
    return lambda module, _args, output: in_place(module, output, lambda x: permuted(site, x))


def in_place(module: nn.Module, x: Tensor, change: Change) -> Tensor:
    """The tensor with its features changed, on whichever axis the module has them."""
    made = x.clone()
    view = features_last(module, made)
    view.copy_(change(view.clone()))
    return made


def _end(name: str, trial: Trial) -> Any:
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        trial.z.setdefault(name, []).extend(x.detach().clone() for x in list(tensors(output))[:1])

    return after


def _kernel(name: str, trial: Trial) -> Any:
    def see(q: Tensor, k: Tensor, scale: float) -> None:
        trial.kernels[name] = q.shape, k.shape, scale

    return see


def tensors(output: Any) -> Iterator[Tensor]:
    """All tensors of real numbers in a model's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
    elif is_dataclass(output) or isinstance(output, SimpleNamespace):
        yield from tensors(vars(output))


def difference(site: Site, at: str, base: Trial, trial: Trial) -> float | None:
    """The relative difference at the consuming layer `at` and on the way to it; None if it was not reached."""
    found = [_difference(site, place, base, trial) for place in (*getattr(site, "between", ()), at)]
    return None if None in found else max(one for one in found if one is not None)


def _difference(site: Site, at: str, base: Trial, trial: Trial) -> float | None:
    before, after = base.z.get(at, []), trial.z.get(at, [])
    if not before or len(before) != len(after):
        return None if not before and not after else float("inf")
    if isinstance(site, MLPSite) and all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        return float("inf")  # the outputs of its layers do not arrive there
    return distance([compared(site, old, undone(site, new)) for old, new in zip(before, after, strict=True)])


def distance(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """How far the second tensors are from the first, relative to their size; None if all are zero or empty."""
    error = size = 0.0
    for old, new in pairs:
        a, b = old.double(), new.double()
        error, size = error + float((a - b).square().sum()), size + float(a.square().sum())
    if size == 0:
        return None if error == 0 else float("inf")
    found = (error / size) ** 0.5
    return found if found == found else float("inf")  # NaN means disagreement


def same_output(base: Trial, trial: Trial) -> bool:
    """Whether the model's output is the same, so that nothing else uses the outputs of a site's layers."""
    if len(base.output) != len(trial.output):
        return False
    return all(_same(a, b, base.limit) for a, b in zip(base.output, trial.output, strict=True))


def _same(a: Tensor, b: Tensor, limit: float) -> bool:
    if a.shape != b.shape:
        return False
    if not a.numel():
        return True
    wide = torch.promote_types(a.dtype, torch.float32)
    x, y = a.to(wide), b.to(wide)  # not wider, because logits of a large vocabulary are most of the work
    size: float = float(x.nan_to_num().square().mean()) ** 0.5
    apart = float((x - y).nan_to_num().abs().max())
    return apart <= 10 * max(tolerance(a.dtype), limit) * max(1e-30, size)
