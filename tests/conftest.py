"""Shared fixtures. corp is imported first: it makes torchvision importable where its build does not fit torch."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads get in each other's way, in child processes too

import pytest
import torch

import corp  # noqa: F401  (before anything imports timm)

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real weights and data; tests that use them skip with a reason where they are not."""
    root = os.environ.get("CORP_ASSETS", "")
    if not root or not Path(root).is_dir():
        pytest.skip("CORP_ASSETS does not point at a folder with real weights and images")
    return Path(root)
