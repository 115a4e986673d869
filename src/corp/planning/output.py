"""The output head of a language model: how much of its rank is kept, and what that costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from corp.calibration.moments import Moments
from corp.numerics.affine import Folded
from corp.numerics.output import LowRank, Spectrum, low_rank, output_spectrum
from corp.numerics.place import in_float64
from corp.planning.site_plan import ratio
from corp.sites import OutputHead, Projection


@dataclass(frozen=True)
class OutputPlan:
    """The rank that the output head keeps, and the predicted squared logit error per token."""

    name: str
    width: int  # the hidden width, which is the rank of the dense head
    keep: int
    J: float
    energy: float
    fold: LowRank | None = field(default=None, compare=False, repr=False)

    @property
    def relative_error(self) -> float:
        return ratio(self.J, self.energy)

    def to_dict(self) -> dict[str, Any]:
        content = asdict(replace(self, fold=None))
        del content["fold"]
        return content


def spectrum_of(linear: Projection, moments: Moments) -> Spectrum:
    cov = moments.cov()
    return output_spectrum(linear.weight.to(cov), cov)


def plan_output(head: OutputHead, keep: int, linear: Projection, moments: Moments, spectrum: Spectrum) -> OutputPlan:
    """The head of rank `keep`, rounded to the dtype of the model."""
    energies = spectrum.energies
    return OutputPlan(
        head.name,
        head.inputs,
        keep,
        float(energies[keep:].sum()),
        float(energies.sum()),
        fold_output(keep, linear, moments, spectrum),
    )


def fold_output(keep: int, linear: Projection, moments: Moments, spectrum: Spectrum) -> LowRank:
    mean = moments.mean
    made = low_rank(Folded(*(part.to(mean) for part in in_float64(*linear))), mean, spectrum, keep)
    return LowRank(*(part.to(linear.weight) for part in made))
