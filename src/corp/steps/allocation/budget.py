"""A budget: what widths cost, and the largest uniform widths within it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from corp.calibration.batches import Forward, evaluating, example, move, placement
from corp.errors import PlanError
from corp.measure.cost import count_macs, count_params
from corp.measure.units import Unit, unit_costs
from corp.planning.widths import width_of
from corp.recipe import Recipe
from corp.sites import Site, Sites

NAMES = {"macs": "MACs", "params": "parameters", "latency": "time per sample"}
STEPS = 40  # bisections: enough to resolve any width
ALL = 1 - 1e-9  # the share that leaves the narrowest widths


@dataclass(frozen=True)
class Budget:
    """What a model may cost, and what it costs with given widths."""

    what: str  # "macs", "params" or "latency"
    share: float
    dense: int
    units: Mapping[str, Unit]
    spared: int = 0  # what is saved outside the sites

    @property
    def limit(self) -> int:
        return int(self.share * self.dense) + self.spared

    def cost(self, sites: Sites, widths: Mapping[str, int]) -> int:
        """The cost with these widths; sites that are not named keep their dense width."""
        return self.dense - sum(self.saved(site, widths.get(site.name, site.width)) for site in sites)

    def saved(self, site: Site, width: int) -> int:
        return self.unit(site.name) * (site.width - width)

    def price(self, site: Site) -> float | Tensor:
        """The price of one unit of width, or the prices of all widths, for numerics.allocate."""
        return self.unit(site.name)

    def unit(self, name: str) -> int:
        cost: int = getattr(self.units[name], self.what)
        return cost


class Sample(NamedTuple):
    """A small batch on which operations are counted and times measured, and how it is passed to the model."""

    batch: Any
    forward: Forward | None = None


def count_budget(model: nn.Module, sites: Sites, what: str, sample: Sample | None) -> Budget:
    """The total cost of the dense model and the cost of each unit of width, for this sample."""
    if sample is None:
        return Budget("params", 1.0, count_params(model), unit_costs(model, sites, None))
    with evaluating(model):
        return Budget(what, 1.0, count_macs(model, *sample), unit_costs(model, sites, *sample))


def one_sample(model: nn.Module, inputs: object) -> Sample:
    """A batch of one for the model, made from the shape of its inputs."""
    if inputs is None:
        raise PlanError(
            "operations and times need the shape of the model's inputs, which statistics lack if the data was fed "
            "by forward=...; use corp.prune with batches, or give target_params"
        )
    device, dtype = placement(model)
    return Sample(move(example(inputs, device), device, dtype))


def uniform(sites: Sites, recipe: Recipe, budget: Budget, queries: float | None = None) -> Recipe:
    """The recipe with the smallest shares that meet the budget: equal ones, or `queries` for Q/K if possible."""

    def fits(share: float) -> bool:
        return _cost(sites, _equal(recipe, share, queries), budget) <= budget.limit

    low, high = 0.0, ALL
    if not fits(high) and queries is not None:
        return uniform(sites, recipe, budget)
    if not fits(high):
        raise PlanError(
            f"target_{budget.what}={budget.share:g} is out of reach: at its narrowest widths the model still has "
            f"{narrowest(sites, recipe, budget):.3f} of the dense model's {NAMES[budget.what]}; give at least that, or "
            "skip and override fewer sites"
        )
    if fits(low):
        return _equal(recipe, 0.0, queries)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return _equal(recipe, high, queries)


def narrowest(sites: Sites, recipe: Recipe, budget: Budget) -> float:
    """The smallest share of the dense cost that equal shares can reach."""
    least = _cost(sites, _equal(recipe, ALL), budget) - budget.spared
    return (least + 0.5) / budget.dense  # so that rounding does not fall below it


def _equal(recipe: Recipe, share: float, queries: float | None = None) -> Recipe:
    attn = share if queries is None else queries
    return recipe.with_shares(mlp=share, attn=attn, vo=attn if recipe.equal_heads else recipe.vo)


def _cost(sites: Sites, asked: Recipe, budget: Budget) -> int:
    return budget.cost(sites, {site.name: width_of(site, sites, asked) for site in sites})
