"""Two real processes plan, fold and prune: each does some of the sites, and both get the bits that one process gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp.calibration.workers import dealt
from tests.helpers import prune_process
from tests.helpers.models import build, images
from tests.helpers.ports import free_port

COMMAND = [sys.executable, "-m", "tests.helpers.prune_process"]


def torchrun(folder: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, *COMMAND[1:], str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def pair_with_a_victim(folder: Path) -> list[tuple[int, str]]:
    """Exit code and errors of two processes, of which the second is killed. torchrun would end the survivor itself."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    pair = [
        subprocess.Popen(
            [*COMMAND, str(folder), "1"], stderr=subprocess.PIPE, text=True, env={**os.environ, **address, "RANK": rank}
        )
        for rank in ("0", "1")
    ]
    try:
        return [(process.wait(120), process.communicate()[1]) for process in pair]
    finally:
        for process in pair:
            process.kill()


def weights(folder: Path, count: int) -> list[Any]:
    """What every process ended with."""
    return [torch.load(folder / f"{count}-{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_two_processes_give_the_bits_of_one_also_after_a_run_of_which_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the other processes have no fixtures either
    corp.calibrate(build("vit"), images(8, 10)).save(tmp_path / "statistics")
    (survivor, said), (victim, _) = pair_with_a_victim(tmp_path)
    assert victim == -signal.SIGKILL
    assert survivor == 1
    assert "error: another worker ended or cannot be reached" in said
    assert "run the same command again" in said
    assert [path.name for path in tmp_path.iterdir()] == ["statistics"]
    prune_process.main(tmp_path)
    torchrun(tmp_path)
    (alone,), pair = weights(tmp_path, 1), weights(tmp_path, 2)
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
