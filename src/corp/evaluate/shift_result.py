"""What a shift of the data does to every site: numbers, table, warning."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from corp.io.tables import text_table

GROWTH = 0.5  # an error that grows by more than this share is warned of
NEGLIGIBLE = 1e-3  # of the output's energy: below it an error may grow as it likes
COLUMNS = ("site", "kind", "mean", "spread", "error expected", "on deployment", "growth", "best there", "bound")


@dataclass(frozen=True)
class SiteShift:
    """One site. Errors are squared, relative to the energy of the site's output (Q/K: of its logits) on that data.

    mean      how far the means are apart: ||W (mu_t - mu_c)|| / sqrt(E||W x||^2); None for Q/K
    spread    the same of second moments: ||W (S_t - S_c) W^T|| / ||W S_c W^T|| with the covariances S; for Q/K of
              H = sum g_q g_k, each relative to its trace
    expected  the error on unseen data like calibration's: the prediction, and what held-out batches add to it
    deployed  the error of the calibrated fit on the deployment data, exactly
    best      what the best fit on the deployment data would leave, the same channels kept
    bound     the propositions' bound of `deployed`; None for subspaces, of which they do not speak
    """

    name: str
    kind: str
    mean: float | None
    spread: float
    expected: float
    deployed: float
    best: float
    bound: float | None

    @property
    def growth(self) -> float:
        """0.5: the error is half as large again as on calibration data."""
        return self.deployed / self.expected - 1 if self.expected > 0 else 0.0

    @property
    def alarming(self) -> bool:
        grown = self.deployed > (1 + GROWTH) * self.expected
        return grown and self.deployed > NEGLIGIBLE

    def row(self) -> tuple[str, ...]:
        """One line of a table, under COLUMNS."""
        mean = "-" if self.mean is None else f"{self.mean:.1%}"
        bound = "-" if self.bound is None else f"{self.bound:.2%}"
        errors = f"{self.expected:.2%}", f"{self.deployed:.2%}", f"{self.growth:+.0%}", f"{self.best:.2%}", bound
        return self.name, self.kind, mean, f"{self.spread:.1%}", *errors


@dataclass(frozen=True)
class Shift:
    """Every site that the plan changes; print it, or take `to_dict()`."""

    samples: tuple[int, int]  # of calibration and of deployment
    sites: tuple[SiteShift, ...]

    @property
    def alarming(self) -> list[SiteShift]:
        """Sites whose error grows by more than GROWTH, the worst first."""
        return sorted((site for site in self.sites if site.alarming), key=lambda site: -site.growth)

    def warning(self) -> str | None:
        """What to tell people, if anything."""
        if not self.alarming:
            return None
        worst = self.alarming[0]
        return (
            f"{worst.name}{f' and {len(self.alarming) - 1} other sites' if len(self.alarming) > 1 else ''}: on the "
            f"deployment data the error is {worst.deployed:.2%} of the output, where calibration promised "
            f"{worst.expected:.2%}; calibrate on the mixture (stats + deployment), or on data like it"
        )

    def to_dict(self) -> dict[str, Any]:
        sites = [{**asdict(site), "growth": site.growth, "alarming": site.alarming} for site in self.sites]
        return {"samples": {"calibration": self.samples[0], "deployment": self.samples[1]}, "sites": sites}

    def __str__(self) -> str:
        return text_table(COLUMNS, [site.row() for site in self.sites])
