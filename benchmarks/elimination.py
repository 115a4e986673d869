"""Seconds of an exact elimination, against a plain Cholesky factorisation of the same size.

    python -m benchmarks.elimination            D = 768, 1,536, 3,072 (and 11,008 with --large: 6 GB)
    python -m benchmarks.elimination --quick    D = 768 only, once

Ratios are of medians of the same run. The covariance is that of correlated channels whose variances span four orders of
magnitude, W has a quarter as many rows as columns, as in an MLP, and the path goes down to one channel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from corp.io.tables import markdown_table
from corp.numerics.exact import MANY, elimination_path

RESULTS = Path(__file__).parent / "results"
WIDTHS, LARGE, ROUNDS, RIDGE = (768, 1536, 3072), 11008, 3, 1e-3


def problem(D: int) -> tuple[Tensor, Tensor]:
    """W (D / 4, D) and a covariance (D, D)."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -2, D, dtype=torch.float64)
    x = torch.randn(2 * D, D, generator=generator, dtype=torch.float64).mul_(scales)
    x[:, 1:] += 0.5 * x[:, :-1]
    return torch.randn(D // 4, D, generator=generator, dtype=torch.float64), x.mT @ x / len(x)


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median of so many runs."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def row(D: int, rounds: int) -> tuple[str, ...]:
    """Measure one width: Cholesky, the inverse that elimination starts from, and the whole elimination."""
    W, cov = problem(D)
    regular = cov.clone()
    regular.diagonal().add_(RIDGE * float(cov.diagonal().mean()))
    cholesky = seconds(lambda: torch.linalg.cholesky(regular), rounds)
    inverse = seconds(lambda: torch.cholesky_inverse(torch.linalg.cholesky(regular)), rounds)
    whole = seconds(lambda: elimination_path(W, cov, ridge=RIDGE), rounds)
    times = (f"{value:.3f}" for value in (cholesky, inverse, whole))
    return f"{D:,}", *times, f"{(whole - inverse) / cholesky:.1f}", f"{whole / cholesky:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest width, once, without writing results")
    parser.add_argument("--large", action="store_true", help="also a width of 11,008, once")
    options = parser.parse_args()
    rows = [row(D, 1 if options.quick else ROUNDS) for D in (WIDTHS[:1] if options.quick else WIDTHS)]
    rows += [row(LARGE, 1)] if options.large else []
    head = ["D", "Cholesky, s", "inverse, s", "elimination, s", "downdates / Cholesky", "elimination / Cholesky"]
    text = (
        f"# Elimination at matrix speed\n\n{torch.get_num_threads()} threads. Cholesky and inverse in float64, the "
        f"elimination in float32 from {MANY:,} channels on.\n\n{markdown_table(head, rows)}"
    )
    print(text)
    if not options.quick:
        (RESULTS / "elimination.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
