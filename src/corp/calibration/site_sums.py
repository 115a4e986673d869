"""The sums of one site, and their files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from corp.calibration.grams import Grams
from corp.calibration.moments import Moments
from corp.calibration.pairs import PairSums
from corp.errors import StatisticsError
from corp.io.files import write_tensors
from corp.numerics.place import Place
from corp.sites import AttentionSite, OutputHead, Site, fingerprint_of

Sums = TypeVar("Sums", Moments, Grams, PairSums)
FINGERPRINT = "fingerprint"
OPTIONAL = ("kron", "lengths", "attended")  # tensors that only some sums have
AnySums: TypeAlias = "SiteSums[Moments] | SiteSums[Grams] | SiteSums[PairSums]"


@dataclass
class SiteSums(Generic[Sums]):
    """The sums of one site, with some batches held out: a fit on `fit` is evaluated on `held`."""

    fit: Sums
    held: Sums

    def total(self) -> Sums:
        """The sums over all batches."""
        return self.fit + self.held

    def fitted(self) -> SiteSums[Sums]:
        """These sums without what was held out."""
        return SiteSums(self.fit, self.fit.empty())

    def at(self, place: Place) -> SiteSums[Sums]:
        """These sums at another place; themselves if they are there already."""
        return SiteSums(_at(self.fit, place), _at(self.held, place))

    def tensors(self) -> dict[str, Tensor]:
        """Everything, flat: fit.* and held.*."""
        parts = {"fit": self.fit, "held": self.held}
        return {f"{part}.{name}": t for part, sums in parts.items() for name, t in sums.state().items()}


def empty_sums(site: Site | OutputHead) -> dict[str, AnySums]:
    """Empty sums of one site, by name; an attention has sums of rotated and of other dimensions, if any."""
    if not isinstance(site, AttentionSite):
        return {site.name: SiteSums(Moments(site.inputs), Moments(site.inputs))}
    sums: dict[str, AnySums] = {}
    if site.rotary:
        sums[site.name] = SiteSums(
            *(PairSums(site.heads, site.groups, site.rotary.dims, normed=site.norm is not None) for _ in range(2))
        )
    if site.plain_width:
        sums[site.plain_name] = SiteSums(*(Grams(site.heads, site.plain_width) for _ in range(2)))
    return sums


def _at(sums: Sums, place: Place) -> Sums:
    """The sums with their tensors on the place's device, and float64 ones in its dtype."""

    def moved(x: Tensor) -> Tensor:
        return x.to(place.device, place.dtype if x.dtype == torch.float64 else x.dtype)

    made, changed = copy.copy(sums), False
    for name, value in vars(sums).items():
        parts = [value] if isinstance(value, Tensor) else value if isinstance(value, list) else []
        there = [moved(part) for part in parts]
        changed |= any(new is not old for new, old in zip(there, parts, strict=True))
        if parts:
            setattr(made, name, there if isinstance(value, list) else there[0])
    return made if changed else sums


@dataclass(frozen=True)
class Entry:
    """One site's entry in a manifest: its file's contents. MLPs have no heads; only rotary sums have key heads."""

    width: int
    heads: int
    file: str
    kv_heads: int = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.heads == 0:
            one = Moments.shapes(self.width)
        else:
            one = (PairSums if self.kv_heads else Grams).shapes(self.heads, self.width)
        return {f"{part}.{name}": shape for part in ("fit", "held") for name, shape in one.items()}

    def build(self, tensors: Mapping[str, Tensor]) -> AnySums:
        fit, held = (
            {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            for name in ("fit", "held")
        )
        if self.heads == 0:
            return SiteSums(*(Moments.from_state(self.width, part) for part in (fit, held)))
        if self.kv_heads:
            return SiteSums(*(PairSums.from_state(self.heads, self.kv_heads, self.width, part) for part in (fit, held)))
        return SiteSums(*(Grams.from_state(self.heads, self.width, part) for part in (fit, held)))


def added(first: AnySums, second: AnySums) -> AnySums:
    """The sum of two sites' sums of the same kind."""
    if type(first.fit) is not type(second.fit):
        raise StatisticsError("sums of different kinds of sites cannot be added")
    both: Any = (first.fit, second.fit), (first.held, second.held)
    return SiteSums(*(a + b for a, b in both))


def entry_of(sums: AnySums, file: str) -> Entry:
    fit = sums.fit
    heads = 0 if isinstance(fit, Moments) else fit.heads
    return Entry(fit.width, heads, file, fit.kv_heads if isinstance(fit, PairSums) else 0)


def write_sums(path: Path, sums: AnySums) -> None:
    """Write one site's file, with a fingerprint of what it holds."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sums.tensors().items()}
    write_tensors(path, tensors, {FINGERPRINT: fingerprint_of(sorted(tensors.items()))})


def read_sums(path: Path, entry: Entry) -> AnySums:
    """Read one site's file, after checking its header against the manifest."""
    shapes = entry.shapes()
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            missing = {name for name in shapes if not name.endswith(OPTIONAL)} - names
            if missing or not names <= set(shapes):
                raise StatisticsError(f"{path} does not hold the sums it should: {sorted(missing or names)[:3]}")
            for name in names:
                if not _fits(tuple(file.get_slice(name).get_shape()), shapes[name]):
                    raise StatisticsError(f"{path}: {name} has shape {file.get_slice(name).get_shape()}")
            tensors = {name: file.get_tensor(name) for name in sorted(names)}
            recorded = (file.metadata() or {}).get(FINGERPRINT)  # older files have none
    except (SafetensorError, OSError) as error:
        raise StatisticsError(f"{path} is damaged or missing: {error}") from error
    for name, tensor in tensors.items():
        if not _plausible(tensor, counts=name.endswith(".counts")):
            raise StatisticsError(f"{path} is damaged: {name} ({tensor.dtype}) has values that no calibration writes")
    if recorded is not None and recorded != fingerprint_of(tensors.items()):
        raise StatisticsError(f"{path} is damaged: its sums are not those that were written; calibrate again")
    return entry.build(tensors)


def _plausible(tensor: Tensor, *, counts: bool) -> bool:
    """Whether counts are whole and not negative, and sums are finite."""
    if counts:
        return tensor.dtype == torch.int64 and bool((tensor >= 0).all())
    return tensor.dtype in (torch.float32, torch.float64) and bool(torch.isfinite(tensor).all())


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether the shapes are equal; -1 matches any length, and a shift may be empty (no tokens seen)."""
    if len(shape) != len(expected):
        return False
    return shape == (0,) or all(e in (-1, s) for s, e in zip(shape, expected, strict=True))


class LazySums(Mapping[str, AnySums]):
    """Sums of the sites in `names`, each computed on access and not cached."""

    def __init__(self, names: Collection[str], make: Callable[[str], AnySums]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> AnySums:
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # Mapping's own method would compute them

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def stored(entries: Mapping[str, Entry], locate: Callable[[str], Path]) -> LazySums:
    """Sums that stay in their folder; each is read on access."""
    return LazySums(entries, lambda name: read_sums(locate(entries[name].file), entries[name]))


def changed(sums: Mapping[str, AnySums], change: Callable[[str, AnySums], AnySums]) -> LazySums:
    """Sums that are changed on access."""
    return LazySums(sums, lambda name: change(name, sums[name]))
