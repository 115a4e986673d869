"""How far a model can be pruned at a given agreement with the dense one: bisection over the budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from corp.errors import PlanError
from corp.recipe import Recipe
from corp.steps.allocation.allocator import Allocation
from corp.steps.allocation.budget import narrowest
from corp.steps.allocation.trials import Trials, bisect, described, ends

STEPS = 6  # models made in the bisection: the target is then known to about 0.01


@dataclass
class Agreement:
    """Bisection over the budget: agreement falls as it shrinks."""

    trials: Trials
    tried: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, Allocation] | None = None  # the lowest target with sufficient agreement
    what: str = ""

    @property
    def kind(self) -> str:
        """The target that is varied: parameters if the shape of the inputs, and so the operations, are unknown."""
        return "macs" if self.trials.allocator.counts_macs else "params"

    def run(self, wanted: float) -> tuple[Recipe, Allocation]:
        allocator = self.trials.allocator
        least = narrowest(allocator.sites, self.at(1.0), allocator.budget(self.kind, 1.0))
        targets = bisect(lambda target: self.reaches(target, wanted), least, 1.0, STEPS)
        if self.best is None:
            raise PlanError(
                f"min_agreement={wanted:g} is out of reach: target_{self.kind}={max(targets):.3f}, the lightest one "
                f"tried, gives {self.tried[-1]['agreement']:.3f}; lower it, or calibrate on more samples"
            )
        chosen, found = self.best
        record = {"wanted": wanted, "what": self.what, "samples": self.trials.samples, "steps": self.tried}
        why = {**found.why, "agreement": {**record, "chosen": chosen}}
        if min(targets) == chosen:
            why["notes"] = [
                f"min_agreement={wanted:g} did not limit the search: target_{self.kind}={chosen:.3f}, the strongest "
                f"pruning possible, still reaches it"
            ]
        return self.at(chosen), found._replace(why=why)

    def at(self, target: float) -> Recipe:
        asked: dict[str, Any] = {"min_agreement": None, f"target_{self.kind}": target}
        return replace(self.trials.recipe, **asked)

    def reaches(self, target: float, wanted: float) -> bool:
        found = self.trials.allocator.allocate(self.at(target))
        closeness = self.trials.compare(found)
        agreement, self.what = closeness.agreement(), closeness.what
        self.tried.append({f"target_{self.kind}": target, "agreement": agreement.value, **ends(agreement)})
        enough = agreement.value >= wanted
        if enough:
            self.best = target, found
        verdict = "enough" if enough else "too little"
        self.trials.allocator.observer.note(
            f"target_{self.kind}={target:.3f}: agreement {described(agreement)}, {verdict}"
        )
        return enough
