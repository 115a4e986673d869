"""The request: one frozen dataclass of plain values, validated before any data is read.

A field's name, type, default, help and panel are defined at the field only; the command line is made from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from corp.errors import RecipeError
from corp.io.tables import Tabular
from corp.recipe import checks
from corp.recipe.checks import Wanted
from corp.recipe.choices import (
    ALLOCATIONS,
    AUTO,
    BASES,
    BUDGET,
    COMPENSATIONS,
    FREE,
    GAIN,
    HOW,
    KINDS,
    PRESETS,
    RANKINGS,
    REMOVE,
    RIDGE,
    ROTARY,
    SUBSPACE,
    TARGETS,
    UNIFORM,
)
from corp.recipe.rounding import check_rounding, multiple_for, nearest

_UNITS = {"target_macs": "MACs", "target_params": "parameters", "target_latency": "time per sample"}
_REMOVED = {"mlp": "MLP channels", "attn": "query and key dimensions", "vo": "value dimensions"}


def _option(default: Any, panel: str, text: str, choices: tuple[str, ...] = ()) -> Any:
    """A field with its text on the command line."""
    return field(default=default, metadata={"panel": panel, "help": text, "choices": choices})


@dataclass(frozen=True)
class Recipe(Tabular):
    """How much to remove, how to choose it, and how to compensate for it.

    The defaults are the best that corp knows; `Recipe.paper(...)` follows the paper exactly, and
    `Recipe.preset(name, ...)` is one of the baselines in `corp.recipe.PRESETS`.
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
        None, BUDGET, "Prune as far as this agreement with the dense model on held-out data allows."
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
        "Tokens of a vision transformer to merge in every block: a list such as 4,7,9,11, or auto under a target. A "
        "merged model returns fewer patch tokens.",
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
        "Round kept widths up to a multiple: a number, or numbers such as mlp=64,head=8. auto: 8 for MLPs of at "
        "least 512 channels and heads of at least 128 dimensions, 4 for heads of at least 64. 1: no rounding. fast: "
        "mlp=64,head=8. gguf: MLPs to llama.cpp's quantisation blocks, 256 if that is at most 1/16 of the width, "
        "otherwise 32.",
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
        "subspace keeps the best combinations of query and key dimensions; coordinates keeps single dimensions.",
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
        "Refit the layers of the pruned model in order, so that later ones repair errors of earlier ones; by "
        "default if model and data allow it.",
    )
    sequential_samples: int | None = _option(
        None, HOW, "Number of samples for the refit; by default enough for 49,152 tokens, or 512 images."
    )

    @classmethod
    def paper(cls, **settings: Any) -> Recipe:
        """Return the paper's recipe with these fields; `Recipe.paper(mlp=0.5, attn=0.5)` is its 50 % row."""
        return cls.preset("paper", **settings)

    @classmethod
    def preset(cls, name: str, **settings: Any) -> Recipe:
        """Return a recipe with the settings of a preset; `settings` override them."""
        checks.require_one_of("preset", name, tuple(PRESETS))
        return cls(**{**PRESETS[name], **settings})

    def __post_init__(self) -> None:
        put = object.__setattr__  # the dataclass is frozen; values are stored in one plain form
        for kind in KINDS:
            put(self, kind, checks.checked_sparsity(kind, getattr(self, kind)))
        if self.output is not None:
            put(self, "output", checks.checked_sparsity("output", self.output))
        self._check_targets()
        for f in fields(self):
            if f.metadata["choices"] and f.name != "intercept":  # its choices are those of the command line
                checks.require_one_of(f.name, getattr(self, f.name), f.metadata["choices"])
        for name in ("intercept", "sequential"):
            checks.require_auto_or_flag(name, getattr(self, name))
        if self.compensate == "mean" and self.intercept is False:
            raise RecipeError("compensate='mean' corrects the bias, so it cannot go with intercept=False")
        put(self, "ridge", checks.non_negative("ridge", self.ridge))
        checks.check_sequential(self.sequential, self.sequential_samples, self.compensate)
        params = self.target_params is not None
        put(self, "tokens", checks.tokens_of(self.tokens, has_target=self.has_target, params=params))
        check_rounding(self.round_to)
        put(self, "skip", checks.globs_of(self.skip))
        put(self, "overrides", checks.overrides_of(self.overrides, ranges=self.has_target))
        checks.check_equal_heads(self.equal_heads, self.attn, self.vo)

    def _check_targets(self) -> None:
        for name, what in TARGETS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, checks.checked_target(name, value, what))
        if len(several := [name for name in TARGETS if getattr(self, name) is not None]) > 1:
            raise RecipeError(f"give {' or '.join(several)}, not both")
        if self.has_target and (given := [kind for kind in KINDS if getattr(self, kind)]):
            raise RecipeError(
                f"a target chooses the widths itself: {', '.join(given)} cannot go with it; use overrides"
            )

    @property
    def refits(self) -> bool:
        """Whether the pruned model is refitted if model and data allow it."""
        return self.sequential is not False and self.compensate == "full"

    @property
    def has_target(self) -> bool:
        """Whether widths are chosen to meet a budget, instead of given as shares."""
        return any(getattr(self, name) is not None for name in TARGETS)

    @property
    def searches(self) -> bool:
        """Whether choosing the widths needs trials on held-out data."""
        return self.min_agreement is not None or (self.has_target and (self.allocate == GAIN or self.splits_evenly))

    @property
    def splits_evenly(self) -> bool:
        """Whether layers lose equal shares, which trials divide between MLPs and heads; not with the paper's ranks."""
        return self.allocate == UNIFORM and self.rank == "exact" and self.target_latency is None

    @property
    def weighs_pairs(self) -> bool:
        """Whether rotary pairs are chosen and fitted by what attention notices, not by their energy as in the paper."""
        return self.rank == "exact" or self.attn_basis == SUBSPACE

    def sparsity(self, kind: str, name: str) -> float:
        """The share to remove at the site `name` of this kind."""
        wanted: float = self.attn if kind == "vo" and self.equal_heads else getattr(self, kind)
        return nearest(wanted, self.limits(kind, name))

    def limits(self, kind: str, name: str) -> tuple[float, float]:
        """The smallest and the largest share that the site may lose; equal if an override gives a number."""
        found: Wanted = (0.0, 1.0)
        for glob, changes in self.overrides.items():
            if fnmatchcase(name, glob) and kind in changes:
                found = changes[kind]
        return found if isinstance(found, tuple) else (found, found)

    def with_shares(self, **shares: float) -> Recipe:
        """The recipe with these shares instead of its target; a range becomes its nearest number to them."""
        overrides = {
            glob: {
                kind: nearest(shares.get(kind, getattr(self, kind)), wanted) if isinstance(wanted, tuple) else wanted
                for kind, wanted in changes.items()
            }
            for glob, changes in self.overrides.items()
        }
        changes: dict[str, Any] = {**dict.fromkeys(TARGETS), **shares}
        return replace(self, **changes, overrides=overrides)

    def goal(self) -> str:
        """The request, in a few words."""
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
        """The multiple to which kept widths are rounded up at sites of this kind, `width` wide in the dense model."""
        return multiple_for(self.round_to, kind, width)

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
