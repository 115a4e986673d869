"""The plan of a model: the plans of its sites and how they were chosen, saved as small, readable JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from corp.errors import PlanError
from corp.io.files import read_json, write_text
from corp.io.tables import Tabular
from corp.planning.merging import Merging
from corp.planning.output import OutputPlan
from corp.planning.site_plan import COLUMNS, GroupCost, SitePlan
from corp.recipe import BASES, COORDINATES, KINDS, Recipe

PLAN_VERSION = 3


@dataclass(frozen=True, repr=False)
class Plan(Tabular):
    """The recipe and, for every site that changes, what it keeps.

    `why` records how widths were chosen under a target, what was tried and measured, and under "notes" every
    deviation from the request. It is only a record: nothing is computed from it.
    """

    recipe: Recipe
    sites: tuple[SitePlan, ...]
    weights: str = ""  # fingerprint of the dense weights it was made for
    samples: int = 0
    why: Mapping[str, Any] = field(default_factory=dict)
    output: OutputPlan | None = None
    merging: Merging | None = None

    @property
    def notes(self) -> list[str]:
        """Sentences on everything that was done differently from the request."""
        return list(self.why.get("notes", ()))

    def noting(self, *notes: str) -> Plan:
        """The plan with these sentences added to its notes."""
        return replace(self, why={**self.why, "notes": [*self.notes, *notes]}) if notes else self

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION,
            "recipe": self.recipe.to_dict(),
            "weights": self.weights,
            "samples": self.samples,
            "why": dict(self.why),
            "sites": [site.to_dict() for site in self.sites],
            "output": None if self.output is None else self.output.to_dict(),
            "merging": None if self.merging is None else self.merging.to_dict(),
        }

    def save(self, path: str | Path) -> None:
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        return cls.from_dict(read_json(Path(path)))

    @classmethod
    def from_dict(cls, raw: object) -> Plan:
        """Parse and check a plan, which may come from an untrusted source."""
        top = _object(raw, "the plan")
        if top.get("version") != PLAN_VERSION:
            raise PlanError(f"plan version {top.get('version')!r} is not {PLAN_VERSION}; make the plan again")
        sites = top.get("sites")
        if not isinstance(sites, list):
            raise PlanError("the plan has no list of sites")
        parsed = tuple(_site(entry, number) for number, entry in enumerate(sites))
        if len({site.name for site in parsed}) != len(parsed):
            raise PlanError("the plan names a site twice")
        weights, samples = top.get("weights", ""), top.get("samples", 0)
        if not isinstance(weights, str) or not _is_count(samples):
            raise PlanError("the plan's 'weights' must be a string and 'samples' a whole number")
        why = _object(top.get("why", {}), "the plan's 'why'")
        output = None if top.get("output") is None else _output(top["output"])
        merging = None if top.get("merging") is None else Merging.from_dict(top["merging"])
        return cls(Recipe.from_dict(top.get("recipe")), parsed, weights, samples, why, output, merging)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """One row per site that changes."""
        if not self.sites:
            return "nothing to prune: every site keeps its width", COLUMNS, []
        return f"plan: {len(self.sites)} sites change", COLUMNS, [site.row() for site in self.sites]


def _object(raw: object, what: str) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise PlanError(f"{what} is not a JSON object")
    return raw


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PlanError(f"{where}: {key} is not a finite number")
    return float(value)


def _site(raw: object, number: int) -> SitePlan:
    entry = _object(raw, f"site {number} of the plan")
    name, kind, width = entry.get("name"), entry.get("kind"), entry.get("width")
    where = f"site {name!r} of the plan"
    if not isinstance(name, str) or kind not in KINDS or not _is_count(width):
        raise PlanError(f"{where}: it needs a name, a kind ({' or '.join(KINDS)}) and a width")
    groups, costs = entry.get("kept"), entry.get("costs")
    if not isinstance(groups, list) or not groups or not isinstance(costs, list):
        raise PlanError(f"{where}: 'kept' and 'costs' must be lists")
    expected = len(groups) if kind == "attn" else 1
    if len(costs) != expected or (kind == "mlp" and len(groups) != 1):
        raise PlanError(f"{where}: {len(groups)} groups with {len(costs)} costs, where {expected} are expected")
    kept = tuple(_indices(group, int(width or 0), where) for group in groups)
    if len({len(group) for group in kept}) != 1:
        raise PlanError(f"{where}: all heads must keep the same number of dimensions")
    intercept = entry.get("intercept")
    if not isinstance(intercept, bool):
        raise PlanError(f"{where}: 'intercept' is not true or false")
    basis = entry.get("basis", COORDINATES)
    if basis not in BASES or (kind == "mlp" and basis != COORDINATES):
        raise PlanError(f"{where}: the basis {basis!r} is unknown")
    parsed = tuple(_cost(_object(cost, where), where) for cost in costs)
    requested = _number(entry, "requested", where)
    ridge = _number(entry, "ridge", where)
    if ridge < 0:
        raise PlanError(f"{where}: the ridge {ridge:g} is negative")
    return SitePlan(name, str(kind), int(width or 0), requested, kept, intercept, parsed, ridge, str(basis))


def _output(raw: object) -> OutputPlan:
    entry = _object(raw, "the plan's 'output'")
    name, width, keep = entry.get("name"), entry.get("width", 0), entry.get("keep", 0)
    if not isinstance(name, str) or not (_is_count(width) and _is_count(keep) and 0 < keep <= width):
        raise PlanError("the plan's 'output' needs a name, a width and a rank within it")
    J, energy = (_number(entry, key, "the plan's 'output'") for key in ("J", "energy"))
    return OutputPlan(name, width, keep, J, energy)


def _cost(raw: Mapping[str, Any], where: str) -> GroupCost:
    numbers = {key: _number(raw, key, where) for key in ("J", "J_star", "J_uncomp", "rho2", "energy")}
    optional = {key: _number(raw, key, where) for key in ("fit", "held", "length") if raw.get(key) is not None}
    return GroupCost(**numbers, **optional)


def _indices(raw: object, width: int, where: str) -> tuple[int, ...]:
    if not isinstance(raw, list) or not raw or len(raw) > width or not all(_is_count(i) for i in raw):
        raise PlanError(f"{where}: kept must be a list of 1 to {width} indices")
    if any(a >= b for a, b in pairwise(raw)) or raw[-1] >= width:
        raise PlanError(f"{where}: kept indices must ascend and stay below {width}")
    return tuple(raw)
