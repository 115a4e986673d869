"""What the user asks for: one frozen dataclass that validates itself before any data is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypeAlias

from corp.errors import RecipeError

Wanted: TypeAlias = float | tuple[float, float]  # a sparsity, or from which to which a target may choose it

RANKINGS = ("combined", "activation", "magnitude", "active", "wanda", "variance", "fluctuation", "exact")
COMPENSATIONS = ("full", "mean", "none")
KINDS = ("mlp", "attn", "vo")  # the kinds of sites; each is a sparsity field of the recipe
TOGETHER = {**{kind: (kind,) for kind in KINDS}, "both": ("mlp", "attn"), "all": KINDS}  # what sweeps prune at once
RIDGE = 1e-3
COORDINATES, SUBSPACE = "coordinates", "subspace"
BASES = (COORDINATES, SUBSPACE)
ROUNDING_KEYS = {"mlp": "mlp", "attn": "head", "vo": "head"}  # kind of site -> its key in round_to
UNIFORM, WORTH = "uniform", "worth"
ALLOCATIONS = (UNIFORM, WORTH)
_PAPER: dict[str, Any] = {
    "rank": "combined",
    "compensate": "full",
    "intercept": "auto",
    "ridge": RIDGE,
    "attn_basis": COORDINATES,
    "allocate": UNIFORM,
    "sequential": False,
}
# Ways of setting the fields that are not given: the paper's, ours, and what people would compare with.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "best": {**_PAPER, "rank": "exact", "attn_basis": SUBSPACE, "allocate": WORTH, "sequential": "auto"},
    "magnitude": {**_PAPER, "rank": "magnitude", "compensate": "none"},
    "wanda": {**_PAPER, "rank": "wanda", "compensate": "none"},  # E[x²]^½·‖W‖, structured
    "vbp": {**_PAPER, "rank": "variance", "compensate": "mean"},  # variance ranking, mean shift into the bias
    "flap": {**_PAPER, "rank": "fluctuation", "compensate": "mean"},  # fluctuation score, bias compensation
    "grail": {**_PAPER, "rank": "wanda", "intercept": False},  # uncentred Gram ridge on the second linear
}
TARGETS = {
    "target_macs": "a share of the dense model's",
    "target_params": "a share of the dense model's",
    "target_latency": "a share of the dense model's",
    "min_agreement": "a share of the dense model's answers",
}  # what widths can be chosen to meet; one at most
FAST = {"mlp": 64, "head": 8}  # widths that kernels and quantisers take whole


@dataclass(frozen=True)
class Recipe:
    """How much to remove, how to choose it, and how to make up for it.

    mlp, attn    share of MLP hidden channels / of each head's Q/K dimensions to remove, in [0, 1)
    vo           the same of each head's value dimensions, which the output projection takes
    equal_heads  values become as wide as queries and keys (which decide): the fused attention kernel, a smaller cache
    target_macs, target_params
                 instead of shares: what is removed leaves at most this share of the dense model's multiply-accumulates
                 or parameters
    target_latency
                 the same of the time that one sample takes here and now: measured, so that it holds for this machine
    min_agreement
                 instead of a target: as far as agreement with the dense model on held-out data allows, between 0 and 1
                 (corp.prune only: it measures models on batches that it holds out of calibration)
    allocate     what a target does: "uniform", the largest equal shares of MLP and Q/K (and values, with equal_heads)
                 that meet it; "worth", MLPs and values share it out by what the next channel is worth
    preset       "paper", "best", or a baseline to compare with: "magnitude", "wanda", "vbp", "flap", "grail". It sets
                 rank, compensate, intercept, ridge, attn_basis, allocate and sequential where they are not given
    rank         how MLP channels are ranked: "combined" E[x^2]*||W||, "activation", "magnitude", "active", "wanda",
                 "variance", "fluctuation", "exact" (what its removal costs after compensation, one by one)
    compensate   "full", "mean" (bias only; for Q/K the same as "none") or "none"
    intercept    may compensation use the bias of the second linear? "auto": where there is one
    ridge        relative: lambda = ridge * mean diagonal of the system; "auto": what does best at the site on held-out
                 batches
    attn_basis   "coordinates": each head keeps some of its Q/K dimensions; "subspace": the best combinations of them
                 (rotated dimensions stay whole pairs)
    vo_basis     "subspace": every head's values are turned so that the leading directions carry most of its output;
                 "coordinates": dimensions are kept as they are, by rank
    sequential   once pruned, fit block after block on what the pruned ones before feed it, so that later layers make up
                 for earlier ones; it needs the data, so only `prune` does it. "auto": where model and data allow it
    sequential_samples
                 of how many samples the hidden states are held for that; None: 256, fewer if they are long
    round_to     round kept widths up to multiples: an int, {"mlp": 64, "head": 8}, or "fast", which is that
    skip         globs over site names that are left alone
    overrides    {glob: {"mlp": s, "attn": s, "vo": s}}: other sparsities for some sites; the last match wins. Under
                 a target s may be a range (0.0, 0.3): the site loses between nothing and 30 %
    """

    mlp: float = 0.0
    attn: float = 0.0
    vo: float = 0.0
    equal_heads: bool = False
    target_macs: float | None = None
    target_params: float | None = None
    target_latency: float | None = None
    min_agreement: float | None = None
    preset: str = "paper"
    rank: str = ""
    compensate: str = ""
    intercept: bool | str = ""
    ridge: float | str = ""
    attn_basis: str = ""
    allocate: str = ""
    vo_basis: str = SUBSPACE
    sequential: bool | str = ""
    sequential_samples: int | None = None
    round_to: int | str | Mapping[str, int] = 1
    skip: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Wanted]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen; this is its constructor
        for kind in KINDS:
            put(self, kind, sparsity_of(kind, getattr(self, kind)))
        self._check_targets()
        one_of("preset", self.preset, tuple(PRESETS))
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) == "":
                put(self, name, value)
        one_of("rank", self.rank, RANKINGS)
        one_of("compensate", self.compensate, COMPENSATIONS)
        if self.intercept not in ("auto", True, False) or not isinstance(self.intercept, bool | str):
            raise RecipeError(f"intercept={self.intercept!r} is not one of 'auto', True, False")
        if self.compensate == "mean" and self.intercept is False:
            raise RecipeError("compensate='mean' is a correction of the bias: it cannot go with intercept=False")
        one_of("vo_basis", self.vo_basis, BASES)
        one_of("attn_basis", self.attn_basis, BASES)
        one_of("allocate", self.allocate, ALLOCATIONS)
        if self.ridge != "auto":
            put(self, "ridge", non_negative("ridge", self.ridge))
        self._check_sequential()
        put(self, "round_to", _rounding(self.round_to))
        put(self, "skip", globs_of(self.skip))
        put(self, "overrides", _overrides(self.overrides, ranges=self.has_target))
        if not isinstance(self.equal_heads, bool):
            raise RecipeError(f"equal_heads={self.equal_heads!r} is not True or False")
        if self.equal_heads and self.vo not in (0.0, self.attn):
            raise RecipeError(
                f"equal_heads makes values as wide as queries and keys: vo={self.vo:g} cannot differ from "
                f"attn={self.attn:g}; leave vo out"
            )
        if self.equal_heads:
            put(self, "vo", self.attn)

    def _check_sequential(self) -> None:
        if self.sequential not in ("auto", True, False) or not isinstance(self.sequential, bool | str):
            raise RecipeError(f"sequential={self.sequential!r} is not one of 'auto', True, False")
        if self.sequential == "auto" and self.compensate != "full":
            object.__setattr__(self, "sequential", False)
        if self.sequential is True and self.compensate != "full":
            raise RecipeError(
                f"sequential fits what compensation adds: it cannot go with compensate={self.compensate!r}"
            )
        samples = self.sequential_samples
        if samples is None:
            return
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise RecipeError(f"sequential_samples={samples!r} is not a whole number >= 1")
        if not self.sequential:
            raise RecipeError("sequential_samples is of use with sequential=True only")

    def at_once(self) -> Recipe:
        """The same without sequential fitting."""
        return replace(self, sequential=False, sequential_samples=None)

    @property
    def ridge_given(self) -> float:
        """The ridge, or the usual one where every site chooses its own."""
        return RIDGE if isinstance(self.ridge, str) else self.ridge

    @property
    def has_target(self) -> bool:
        """Are widths chosen to meet a budget, instead of given as shares?"""
        return any(getattr(self, name) is not None for name in TARGETS)

    def _check_targets(self) -> None:
        for name, what in TARGETS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= 1:
                raise RecipeError(f"{name}={value!r} must be {what}, 0 < {name} <= 1")
            object.__setattr__(self, name, float(value))
        if len(several := [name for name in TARGETS if getattr(self, name) is not None]) > 1:
            raise RecipeError(f"give {' or '.join(several)}, not both")
        if self.has_target and (given := [kind for kind in KINDS if getattr(self, kind)]):
            raise RecipeError(
                f"a target chooses the widths itself: {', '.join(given)} cannot go with it; use overrides"
            )

    def sparsity(self, kind: str, name: str) -> float:
        """The sparsity asked for at the site `name` of this kind."""
        wanted: float = getattr(self, kind)
        return _nearest(wanted, self.limits(kind, name))

    def limits(self, kind: str, name: str) -> tuple[float, float]:
        """The least and the most that the site may lose; equal where an override says exactly how much."""
        found: Wanted = (0.0, 1.0)
        for glob, changes in self.overrides.items():
            if fnmatchcase(name, glob) and kind in changes:
                found = changes[kind]
        return found if isinstance(found, tuple) else (found, found)

    def with_shares(self, **shares: float) -> Recipe:
        """The same with these shares instead of a target; of a range, what is nearest to them."""
        overrides = {
            glob: {
                kind: _nearest(shares.get(kind, getattr(self, kind)), wanted) if isinstance(wanted, tuple) else wanted
                for kind, wanted in changes.items()
            }
            for glob, changes in self.overrides.items()
        }
        changes: dict[str, Any] = {**dict.fromkeys(TARGETS), **shares}
        return replace(self, **changes, overrides=overrides)

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.skip)

    def multiple(self, kind: str) -> int:
        """Kept widths at sites of this kind are rounded up to a multiple of this."""
        if isinstance(self.round_to, int):
            return self.round_to
        assert not isinstance(self.round_to, str)  # the constructor has put in what a name stands for
        return self.round_to.get(ROUNDING_KEYS[kind], 1)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "skip": list(self.skip)}

    @classmethod
    def from_dict(cls, raw: object) -> Recipe:
        if not isinstance(raw, Mapping):
            raise RecipeError(f"a recipe is a JSON object, not {type(raw).__name__}")
        unknown = sorted(set(map(str, raw)) - {f.name for f in fields(cls)})
        if unknown:
            raise RecipeError(f"unknown recipe field(s): {', '.join(unknown)}")
        return cls(**{str(key): value for key, value in raw.items()})


def kept_width(width: int, sparsity: float, multiple: int = 1) -> int:
    """ceil((1 - s) d) in exact arithmetic (floats give 57 for 0.3 * 80 removed), rounded up to `multiple`.

    With this rule all parameter counts of the paper's efficiency table come out exactly.
    """
    exact = max(1, math.ceil(round((1 - sparsity) * width, 9)))
    return min(width, -(-exact // multiple) * multiple)


def _rounding(value: object) -> int | dict[str, int]:
    if value == "fast":
        return dict(FAST)
    if not isinstance(value, Mapping):
        return multiple_of(value)
    known = sorted(set(ROUNDING_KEYS.values()))
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise RecipeError(f"round_to: unknown key(s) {', '.join(unknown)}; it takes {', '.join(known)}")
    return {str(key): multiple_of(multiple) for key, multiple in value.items()}


def _overrides(value: object, *, ranges: bool) -> dict[str, dict[str, Wanted]]:
    if not isinstance(value, Mapping):
        raise RecipeError(f"overrides={value!r} must look like {{'blocks.0.*': {{'mlp': 0.2}}}}")
    checked: dict[str, dict[str, Wanted]] = {}
    for glob, changes in value.items():
        if not isinstance(glob, str) or not isinstance(changes, Mapping) or not changes:
            raise RecipeError(f"overrides[{glob!r}]={changes!r} must look like {{'mlp': 0.2, 'attn': 0.1}}")
        unknown = sorted(str(key) for key in changes if key not in KINDS)
        if unknown:
            raise RecipeError(f"overrides[{glob!r}]: unknown key(s) {', '.join(unknown)}; it takes {', '.join(KINDS)}")
        checked[glob] = {str(kind): _wanted(f"overrides[{glob!r}][{kind!r}]", s) for kind, s in changes.items()}
        if not ranges and any(isinstance(wanted, tuple) for wanted in checked[glob].values()):
            raise RecipeError(f"overrides[{glob!r}]: a range leaves a choice, which only a target makes; give a number")
    return checked


def _wanted(name: str, value: object) -> Wanted:
    if not isinstance(value, list | tuple):
        return sparsity_of(name, value)
    if len(value) != 2 or (low := sparsity_of(name, value[0])) > (high := sparsity_of(name, value[1])):
        raise RecipeError(f"{name}={value!r} is not a range of sparsities: give (least, most), such as (0.0, 0.3)")
    return low, high


def _nearest(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return min(max(value, low), high)


def sparsity_of(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise RecipeError(f"{name}={value!r} is not a sparsity: give the share to remove, 0 <= {name} < 1")
    return float(value)


def non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise RecipeError(f"{name}={value!r} must be a finite number >= 0, or 'auto'")
    return float(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def multiple_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError(f"round_to: {value!r} is not a whole number >= 1 (or 'fast')")
    return value


def globs_of(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple | set | frozenset) or not all(isinstance(g, str) and g for g in globs):
        raise RecipeError(f"skip={value!r} must be a glob or a list of globs over site names, such as 'blocks.0.*'")
    return tuple(sorted(globs)) if isinstance(globs, set | frozenset) else tuple(globs)
