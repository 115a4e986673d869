"""Commands that are killed, starved or robbed at some moment: a few of what `make soak` does hundreds of times."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.faults import BrokenError, Ended, Trial, Workshop, attempt, can_mount, say_why

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals as Linux has them")

CASES = [
    ("SIGKILL", "calibrate"),
    pytest.param("SIGKILL", "prune with statistics", marks=pytest.mark.slow),
    ("SIGTERM", "calibrate images"),
    ("SIGINT", "merge"),
    ("file size limit", "report"),
    pytest.param("file size limit", "calibrate", marks=pytest.mark.slow),
    pytest.param("file size limit", "export pt2", marks=pytest.mark.slow),
    ("full disk", "prune with statistics"),
    ("read-only output", "merge"),
    ("input removed", "calibrate"),
    ("memory exhausted", "merge"),
]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


@pytest.mark.parametrize(("fault", "command"), CASES)
def test_a_fault_costs_nothing_but_its_run(fault: str, command: str, shop: Workshop, tmp_path: Path) -> None:
    if fault == "full disk" and not can_mount(tmp_path / "mounted"):
        pytest.skip("no file system can be mounted here; the file size limit stands in for a full disk")
    assert attempt(shop, fault, command, seed=0)


def test_the_harness_sees_broken_promises(shop: Workshop) -> None:
    trial = Trial(shop, "merge", random.Random(0), shop.folder / "by hand")
    good = trial.run()
    trial.check_output(good)
    (trial.out / "site-0001.safetensors").write_bytes(b"half")
    with pytest.raises(BrokenError, match="does not load"):
        trial.check_output(good)
    (trial.out / "statistics.json").unlink()
    with pytest.raises(BrokenError, match="lacks"):
        trial.check_output(good)
    with pytest.raises(BrokenError, match="traceback"):
        say_why(Ended(1, "", "Traceback (most recent call last): ...", 0.0), "")
    with pytest.raises(BrokenError, match="does not name the cause"):
        say_why(Ended(1, "", "error: something", 0.0), "no space")
