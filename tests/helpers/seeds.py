"""What random tests draw from: CORP_TEST_SEED, and CORP_TEST_ORDER for the order of tests. "random" draws one.

Both are 0 unless set: the same numbers, and tests in the order in which they are written. pytest prints them first.
"""

from __future__ import annotations

import os
import random

import torch

SEED_NAME, ORDER_NAME = "CORP_TEST_SEED", "CORP_TEST_ORDER"


def _chosen(name: str) -> int:
    """The variable's number. One that was drawn is written back, so that worker and child processes share it."""
    if os.environ.get(name) == "random":
        os.environ[name] = str(random.SystemRandom().randrange(1, 10**6))
    return int(os.environ.get(name, "0"))


SEED, ORDER = _chosen(SEED_NAME), _chosen(ORDER_NAME)


def seed(number: int = 0) -> int:
    """The seed that a test calls `number`: that number itself in the run with seed 0, otherwise another."""
    return number + 100_000 * SEED


def seeded(number: int = 0) -> torch.Generator:
    """A generator of its own for one test's data."""
    return torch.Generator().manual_seed(seed(number))


def seed_all(number: int = 0) -> None:
    """Seed torch's own generator, from which layers draw their weights."""
    torch.manual_seed(seed(number))
