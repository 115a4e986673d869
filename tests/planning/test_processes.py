"""Two real processes plan, fold and prune: each does some of the sites, and both get the bits that one process gets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp.calibration.workers import dealt
from tests.helpers.models import build, images


def run(count: int, folder: Path) -> list[Any]:
    """The weights that every process ended with."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)] if count > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.helpers.prune_process", str(folder)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{count}-{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_two_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    corp.calibrate(build("vit"), images(8, 10)).save(tmp_path / "statistics")
    (alone,), pair = run(1, tmp_path), run(2, tmp_path)
    for together in pair:
        for how in ("planned", "folded"):  # from the same statistics
            assert alone[how].keys() == together[how].keys()
            for name, weight in alone[how].items():
                assert torch.equal(weight, together[how][name]), (how, name)
        for name, weight in alone["pruned"].items():  # their own statistics add up in another order
            torch.testing.assert_close(together["pruned"][name], weight, rtol=1e-5, atol=1e-6)
    for name, weight in pair[0]["pruned"].items():
        assert torch.equal(weight, pair[1]["pruned"][name]), name
    said = [(tmp_path / f"2-{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "no tokens were seen" in said[0]


def test_the_dearest_site_goes_to_whom_has_least_to_do() -> None:
    assert dealt([1, 8, 3, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert dealt([5, 5, 5], 1) == [0, 0, 0]
    assert dealt([], 3) == []
