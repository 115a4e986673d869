"""Shared fixtures. corp is imported first: it makes torchvision importable where its build does not fit torch."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads get in each other's way, in child processes too


def _avoid_broken_matrix_units() -> None:
    """Some virtual machines report AMX and then kill the process that uses it: bfloat16 needs another path there."""
    cpu = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not cpu.is_file() or "amx_bf16" not in cpu.read_text():
        return
    code = "import torch; x = torch.ones(32, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
    works = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    os.environ["ONEDNN_MAX_CPU_ISA"] = "ALL" if works else "AVX512_CORE_FP16"


_avoid_broken_matrix_units()

import pytest
import torch

import corp  # noqa: F401  (before anything imports timm)
from tests.helpers.seeds import ORDER, ORDER_NAME, SEED, SEED_NAME, seed_all

torch.set_num_threads(1)


def pytest_report_header() -> str:
    return f"to draw the same again: {SEED_NAME}={SEED} {ORDER_NAME}={ORDER}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle files, and tests within files: tests of a file share costly fixtures."""
    if not ORDER:
        return
    draw = random.Random(ORDER)
    rank = {path: draw.random() for path in sorted({item.path for item in items})}
    draw.shuffle(items)
    items.sort(key=lambda item: rank[item.path])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_all()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> None:
    """Fixtures that several tests share draw the same whichever test is first."""
    if fixturedef.scope != "function":
        seed_all()


@pytest.fixture(autouse=True)
def _enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have few tokens per channel; those that are about judging the ranking by that set it themselves."""
    monkeypatch.setattr("corp.steps.allocation.search.TOKENS_PER_CHANNEL", 0)


@pytest.fixture(scope="session")
def assets() -> Path:
    """Real weights and data; tests that use them skip with a reason where they are not."""
    root = os.environ.get("CORP_ASSETS", "")
    if not root or not Path(root).is_dir():
        pytest.skip("CORP_ASSETS does not point at a folder with real weights and images")
    return Path(root)
