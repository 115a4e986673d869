"""What a prune returns: the smaller model, its plan, its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from corp.calibration.batches import Forward
from corp.io.tables import Tabular
from corp.measure.comparison import Comparison, compare
from corp.planning.plan import Plan
from corp.planning.report import TOTALS, Report


@dataclass(frozen=True, repr=False)
class Result(Tabular):
    """A smaller model, how it was made, and its predicted errors."""

    model: nn.Module
    plan: Plan
    report: Report
    origin: dict[str, Any] = field(default_factory=dict)  # what calibration used: model, data, preprocessing, versions

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Parameters and operations before and after."""
        return f"{type(self.model).__name__}, {len(self.plan.sites)} sites pruned", TOTALS, self.report.totals()

    def compare(self, dense: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> Comparison:
        """Run `dense`, the model that was pruned, and the pruned one over `batches`, and compare outputs and time.

        Use other batches than those of the calibration.
        """
        return compare(dense, self.model, list(batches), forward)
