"""What is asked for: one frozen dataclass of plain values, validated before any data is touched.

A field's name, type, default, help and panel stand at the field and nowhere else: the command line is made from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, TypeAlias

from corp.errors import RecipeError
from corp.tables import Tabular

Wanted: TypeAlias = float | tuple[float, float]  # a sparsity, or the range from which a target may choose it

RANKINGS = ("exact", "combined", "activation", "magnitude", "active", "wanda", "variance", "fluctuation")
COMPENSATIONS = ("full", "mean", "none")
KINDS = ("mlp", "attn", "vo")  # the kinds of sites; each is a sparsity field of the recipe
TOGETHER = {**{kind: (kind,) for kind in KINDS}, "both": ("mlp", "attn"), "all": KINDS}  # what a sweep prunes at once
RIDGE = 1e-3
COORDINATES, SUBSPACE = "coordinates", "subspace"
BASES = (SUBSPACE, COORDINATES)
ROUNDING_KEYS = {"mlp": "mlp", "attn": "head", "vo": "head"}  # kind of site -> its key in round_to
UNIFORM, GAIN = "uniform", "gain"
ALLOCATIONS = (GAIN, UNIFORM)
FREE, SHARED = "free", "shared"
ROTARY = (FREE, SHARED)
AUTO = "auto"
FAST = {"mlp": 64, "head": 8}  # widths that kernels and quantisers take whole
BLOCK, SUPERBLOCK = 32, 256  # weights of a row that llama.cpp quantises together: simple formats, K-quants
NAMED_MULTIPLES = ("auto", "fast", "gguf")
EVEN = 8  # what round_to="auto" rounds to, at widths from these on: below, rounding would cost more than it gains
EVEN_FROM = {"mlp": 512, "head": 64}
# Settings of the paper, and of methods that people compare with. "best" is what the fields' own defaults are.
_PAPER: dict[str, Any] = {
    "rank": "combined",
    "attn_basis": COORDINATES,
    "allocate": UNIFORM,
    "sequential": False,
    "round_to": 1,
    "output": 0.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "best": {},
    "paper": _PAPER,
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
_UNITS = {"target_macs": "MACs", "target_params": "parameters", "target_latency": "time per sample"}
_REMOVED = {"mlp": "MLP channels", "attn": "query and key dimensions", "vo": "value dimensions"}
REMOVE, BUDGET, HOW = "What to remove", "Budget and search", "How"  # panels of `corp prune --help`


def _option(default: Any, panel: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with what the command line says of it."""
    return field(default=default, metadata={"panel": panel, "help": text, "choices": choices})


@dataclass(frozen=True)
class Recipe(Tabular):
    """How much to remove, how to choose it, and how to compensate for it.

    The defaults are the best that corp knows; `Recipe.paper(...)` is the paper's method to the letter, and
    `Recipe.preset(name, ...)` one of the baselines in `corp.recipe.PRESETS`.
    """

    mlp: float = _option(0.0, REMOVE, "Share of the MLP hidden channels to remove, 0 <= s < 1.")
    attn: float = _option(0.0, REMOVE, "Share of every head's query and key dimensions to remove, 0 <= s < 1.")
    vo: float = _option(0.0, REMOVE, "Share of every head's value dimensions to remove, 0 <= s < 1.")
    output: float | None = _option(
        None, REMOVE, "Share of a language model's output head, in rank, to remove; chosen under a target by default."
    )
    target_macs: float | None = _option(
        None, BUDGET, "Instead of shares: keep at most this share of the dense model's multiply-accumulates."
    )
    target_params: float | None = _option(
        None, BUDGET, "Instead of shares: keep at most this share of the dense model's parameters."
    )
    target_latency: float | None = _option(
        None, BUDGET, "Instead of shares: take at most this share of the dense model's time per sample, measured here."
    )
    min_agreement: float | None = _option(
        None,
        BUDGET,
        "Prune as far as this agreement with the dense model on held-out data allows.",
    )
    allocate: str = _option(
        GAIN,
        BUDGET,
        "How a target is met: gain gives every layer its own width, by marginal gain; uniform gives all the same.",
        ALLOCATIONS,
    )
    tokens: str | tuple[int, ...] | None = _option(
        None,
        REMOVE,
        "Tokens of a vision transformer to merge in every block: a list such as 4,7,9,11, or auto under a target. "
        "A merged model gives fewer patch tokens to whoever reads them.",
    )
    equal_heads: bool = _option(
        False, REMOVE, "Give values the width of queries and keys: fused attention kernels and smaller caches."
    )
    skip: tuple[str, ...] = _option((), REMOVE, "A glob over the names of sites to leave alone; may be repeated.")
    overrides: Mapping[str, Mapping[str, Wanted]] = field(
        default_factory=dict,
        metadata={
            "panel": REMOVE,
            "help": "Other shares for some sites, such as 'blocks.0.*:mlp=0.2,attn=0'; the last match wins. Under a "
            "target a range is allowed: mlp=0-0.3. May be repeated.",
            "choices": (),
        },
    )
    round_to: int | str | Mapping[str, int] = _option(
        AUTO,
        REMOVE,
        "Round kept widths up to a multiple: auto is 8 for MLPs from 512 channels and heads from 64 dimensions on, and "
        "1 turns it off; a number, mlp=64,head=8, fast, which stands for these, or gguf: MLPs to "
        "what llama.cpp quantises together, 256 where that is at most 1/16 of the width, else 32.",
    )
    rank: str = _option(
        "exact",
        HOW,
        "How MLP channels are ranked: exact is the cost of each removal after compensation, combined is the paper's.",
        RANKINGS,
    )
    compensate: str = _option(
        "full", HOW, "full predicts what is removed from what is kept; mean corrects biases only.", COMPENSATIONS
    )
    intercept: bool | str = _option(
        AUTO,
        HOW,
        "Whether compensation may use the bias of the second linear; auto: if it has one.",
        (AUTO, "yes", "no"),
    )
    ridge: float = _option(RIDGE, HOW, "Ridge of every fit, relative to the mean diagonal of its system.")
    attn_basis: str = _option(
        SUBSPACE,
        HOW,
        "subspace keeps the best combinations of query and key dimensions, coordinates some of them.",
        BASES,
    )
    vo_basis: str = _option(SUBSPACE, HOW, "The same choice for value dimensions.", BASES)
    rotary: str = _option(
        FREE,
        HOW,
        "free: every head keeps the rotary pairs it needs most; shared: all heads of all layers keep the same pairs, "
        "so that plain transformers, vLLM and llama.cpp can hold the narrower heads.",
        ROTARY,
    )
    sequential: bool | str = _option(
        AUTO,
        HOW,
        "Refit the layers of the pruned model in order, so that later ones repair errors of earlier ones; "
        "by default where model and data allow it.",
    )
    sequential_samples: int | None = _option(
        None, HOW, "How many samples the refit uses; 256, or fewer if they are long, by default."
    )

    @classmethod
    def paper(cls, **settings: Any) -> Recipe:
        """Return the paper's recipe with these fields; `Recipe.paper(mlp=0.5, attn=0.5)` is its 50 % row."""
        return cls.preset("paper", **settings)

    @classmethod
    def preset(cls, name: str, **settings: Any) -> Recipe:
        """Return a recipe with the settings of a preset where `settings` does not say otherwise."""
        _one_of("preset", name, tuple(PRESETS))
        return cls(**{**PRESETS[name], **settings})

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen; values are stored in one plain form
        for kind in KINDS:
            put(self, kind, _sparsity(kind, getattr(self, kind)))
        if self.output is not None:
            put(self, "output", _sparsity("output", self.output))
        self._check_targets()
        for name in ("rank", "compensate", "vo_basis", "attn_basis", "allocate", "rotary"):
            _one_of(name, getattr(self, name), _choices(name))
        for name in ("intercept", "sequential"):
            value = getattr(self, name)
            if value != AUTO and not isinstance(value, bool):
                raise RecipeError(f"{name}={value!r} is not one of 'auto', True, False")
        if self.compensate == "mean" and self.intercept is False:
            raise RecipeError("compensate='mean' corrects the bias, so it cannot go with intercept=False")
        put(self, "ridge", _non_negative("ridge", self.ridge))
        self._check_sequential()
        self._check_tokens()
        _check_rounding(self.round_to)
        put(self, "skip", _globs(self.skip))
        put(self, "overrides", _overrides(self.overrides, ranges=self.has_target))
        if not isinstance(self.equal_heads, bool):
            raise RecipeError(f"equal_heads={self.equal_heads!r} is not True or False")
        if self.equal_heads and self.vo not in (0.0, self.attn):
            raise RecipeError(
                f"equal_heads gives values the width of queries and keys, so vo={self.vo:g} cannot differ from "
                f"attn={self.attn:g}; leave vo out"
            )

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

    def _check_sequential(self) -> None:
        if self.sequential is True and self.compensate != "full":
            raise RecipeError(
                f"sequential=True refits compensated layers, so it cannot go with compensate={self.compensate!r}"
            )
        samples = self.sequential_samples
        if samples is None:
            return
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise RecipeError(f"sequential_samples={samples!r} is not a whole number >= 1")
        if not self.refits:
            raise RecipeError("sequential_samples is used by the refit only: it cannot go with sequential=False")

    def _check_tokens(self) -> None:
        if self.tokens is None:
            return
        if self.tokens == AUTO:
            if self.target_params is not None:
                raise RecipeError(
                    "tokens='auto' cannot go with target_params: merging saves operations and time, and no parameters"
                )
            if not self.has_target:
                raise RecipeError(
                    "tokens='auto' chooses tokens within target_macs, target_latency or min_agreement; give one of "
                    "them, or a list of numbers"
                )
            return
        given = self.tokens
        if not isinstance(given, list | tuple) or any(isinstance(r, bool) or not isinstance(r, int) for r in given):
            raise RecipeError(f"tokens={given!r} is not 'auto' or a list with the tokens to merge in every block")
        object.__setattr__(self, "tokens", tuple(given))

    @property
    def refits(self) -> bool:
        """Whether the pruned model is to be refitted, if model and data allow it."""
        return self.sequential is not False and self.compensate == "full"

    @property
    def has_target(self) -> bool:
        """Whether widths are chosen to meet a budget, instead of given as shares."""
        return any(getattr(self, name) is not None for name in TARGETS)

    @property
    def searches(self) -> bool:
        """Whether models have to be tried on held-out data to choose the widths."""
        return self.min_agreement is not None or (self.has_target and (self.allocate == GAIN or self.splits_evenly))

    @property
    def splits_evenly(self) -> bool:
        """Whether layers lose the same, and trials tell how much of it are heads: not under the paper's rankings."""
        return self.allocate == UNIFORM and self.rank == "exact" and self.target_latency is None

    def sparsity(self, kind: str, name: str) -> float:
        """The share that is to be removed at the site `name` of this kind."""
        wanted: float = self.attn if kind == "vo" and self.equal_heads else getattr(self, kind)
        return _nearest(wanted, self.limits(kind, name))

    def limits(self, kind: str, name: str) -> tuple[float, float]:
        """The least and the most that the site may lose; they are equal where an override gives a number."""
        found: Wanted = (0.0, 1.0)
        for glob, changes in self.overrides.items():
            if fnmatchcase(name, glob) and kind in changes:
                found = changes[kind]
        return found if isinstance(found, tuple) else (found, found)

    def with_shares(self, **shares: float) -> Recipe:
        """The recipe with these shares instead of its target; a range becomes the number in it nearest to them."""
        overrides = {
            glob: {
                kind: _nearest(shares.get(kind, getattr(self, kind)), wanted) if isinstance(wanted, tuple) else wanted
                for kind, wanted in changes.items()
            }
            for glob, changes in self.overrides.items()
        }
        changes: dict[str, Any] = {**dict.fromkeys(TARGETS), **shares}
        return replace(self, **changes, overrides=overrides)

    def goal(self) -> str:
        """What is asked for, in a few words."""
        if self.min_agreement is not None:
            return f"as far as {self.min_agreement:.1%} agreement with the dense model allows"
        for name, what in _UNITS.items():
            if (share := getattr(self, name)) is not None:
                return f"to at most {share:.0%} of its {what}"
        parts = [f"{share:.0%} of its {what}" for kind, what in _REMOVED.items() if (share := getattr(self, kind))]
        return "by " + (" and ".join(parts) or "what overrides, output and tokens say")

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.skip)

    def multiple(self, kind: str, width: int) -> int:
        """Kept widths at sites of this kind, `width` wide in the dense model, are rounded up to a multiple of this."""
        if isinstance(self.round_to, int):
            return self.round_to
        if self.round_to == "gguf":
            multiples: Mapping[str, int] = {"mlp": SUPERBLOCK if width >= 16 * SUPERBLOCK else BLOCK}
        elif self.round_to == AUTO:
            multiples = {key: EVEN for key, least in EVEN_FROM.items() if width >= least}
        else:
            multiples = FAST if isinstance(self.round_to, str) else self.round_to
        return multiples.get(ROUNDING_KEYS[kind], 1)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, str]]]:
        """What differs from the defaults."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        defaults = Recipe()
        rows = [(name, str(value)) for name, value in given if value != getattr(defaults, name)]
        return f"recipe: {preset_of(self)} settings", ("field", "value"), rows

    def to_dict(self) -> dict[str, Any]:
        tokens = list(self.tokens) if isinstance(self.tokens, tuple) else self.tokens
        return {**asdict(self), "skip": list(self.skip), "tokens": tokens}

    @classmethod
    def from_dict(cls, raw: object) -> Recipe:
        if not isinstance(raw, Mapping):
            raise RecipeError(f"a recipe is a JSON object, not {type(raw).__name__}")
        unknown = sorted(set(map(str, raw)) - {f.name for f in fields(cls)})
        if unknown:
            raise RecipeError(f"unknown recipe field(s): {', '.join(unknown)}")
        return cls(**{str(key): value for key, value in raw.items()})


def preset_of(recipe: Recipe) -> str:
    """The name of the preset whose settings the recipe has, or "custom"."""
    settings = {name for preset in PRESETS.values() for name in preset}
    defaults = {f.name: f.default for f in fields(Recipe)}
    for name, preset in PRESETS.items():
        if all(getattr(recipe, key) == preset.get(key, defaults[key]) for key in settings):
            return name
    return "custom"


def kept_width(width: int, sparsity: float, multiple: int = 1) -> int:
    """ceil((1 - s) d) in exact arithmetic (floats give 57 for 0.3 * 80 removed), rounded up to `multiple`.

    With this rule all parameter counts of the paper's efficiency table come out exactly.
    """
    exact = max(1, math.ceil(round((1 - sparsity) * width, 9)))
    return min(width, -(-exact // multiple) * multiple)


def _choices(name: str) -> tuple[str, ...]:
    found: tuple[str, ...] = next(f.metadata["choices"] for f in fields(Recipe) if f.name == name)
    return found


def _sparsity(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < 1:
        raise RecipeError(f"{name}={value!r} is not a sparsity: give the share to remove, 0 <= {name} < 1")
    return float(value)


def _non_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise RecipeError(f"{name}={value!r} must be a finite number >= 0")
    return float(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise RecipeError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _check_rounding(value: object) -> None:
    if value in NAMED_MULTIPLES:
        return
    known = sorted(set(ROUNDING_KEYS.values()))
    if isinstance(value, Mapping) and (unknown := sorted(str(key) for key in value if key not in known)):
        raise RecipeError(f"round_to: unknown key(s) {', '.join(unknown)}; it takes {', '.join(known)}")
    for multiple in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise RecipeError(f"round_to: {multiple!r} is not a whole number >= 1 (or 'auto', 'fast', 'gguf')")


def _globs(value: object) -> tuple[str, ...]:
    globs = (value,) if isinstance(value, str) else value
    if not isinstance(globs, list | tuple | set | frozenset) or not all(isinstance(g, str) and g for g in globs):
        raise RecipeError(f"skip={value!r} must be a glob or a list of globs over site names, such as 'blocks.0.*'")
    return tuple(sorted(globs)) if isinstance(globs, set | frozenset) else tuple(globs)


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
        return _sparsity(name, value)
    if len(value) != 2 or (low := _sparsity(name, value[0])) > (high := _sparsity(name, value[1])):
        raise RecipeError(f"{name}={value!r} is not a range of sparsities: give (least, most), such as (0.0, 0.3)")
    return low, high


def _nearest(value: float, limits: tuple[float, float]) -> float:
    low, high = limits
    return min(max(value, low), high)
