"""Two real processes plan, fold and prune: each does some of the sites, and both get the bits that one process gets."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp.calibration.workers import dealt
from tests.helpers import plain, prune_process


def pairs(*orders: str) -> list[list[int]]:
    """Exit codes of pairs of processes."""
    command = [sys.executable, "-m", "tests.helpers.prune_process", *orders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.removeprefix(prune_process.CODES) for line in done.stdout.splitlines() if prune_process.CODES in line]
    return [[int(code) for code in line.split()] for line in told]


def weights(folder: Path, count: int) -> list[Any]:
    """What every process ended with."""
    return [torch.load(folder / f"{count}-{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_two_processes_give_the_bits_of_one_also_after_a_run_of_which_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the other processes have no fixtures either
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        corp.calibrate(plain.build(), plain.sequences(8, 10)).save(folder / "statistics")
    assert pairs(f"{killed}:1", f"{whole}:-1") == [[1, -signal.SIGKILL], [0, 0]]
    said = (tmp_path / "killed-0.error").read_text()
    assert "another worker ended or cannot be reached" in said
    assert "run the same command again" in said
    assert [path.name for path in killed.iterdir()] == ["statistics"]
    prune_process.main(whole)
    (alone,), pair = weights(whole, 1), weights(whole, 2)
    for together in pair:
        for how in ("planned", "folded"):  # from the same statistics
            assert alone[how].keys() == together[how].keys()
            for name, weight in alone[how].items():
                assert torch.equal(weight, together[how][name]), (how, name)
        for name, weight in alone["pruned"].items():  # their own statistics add up in another order
            torch.testing.assert_close(together["pruned"][name], weight, rtol=1e-5, atol=1e-6)
    for name, weight in pair[0]["pruned"].items():
        assert torch.equal(weight, pair[1]["pruned"][name]), name
    said = [(whole / f"2-{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert "no tokens were seen" in said[0]


def test_the_dearest_site_goes_to_whom_has_least_to_do() -> None:
    assert dealt([1, 8, 3, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert dealt([5, 5, 5], 1) == [0, 0, 0]
    assert dealt([], 3) == []
