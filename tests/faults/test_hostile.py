"""Models of strangers that ask for gigabytes are refused before anything of that size is allocated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hostile import ATTACKS

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory as Linux counts it")
def test_what_asks_for_too_much_is_refused_before_it_is_allocated() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.hostile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["attack"] for line in told] == list(ATTACKS)
    assert [line for line in told if line["outcome"].startswith(("accepted", "BROKEN"))] == []
    assert [line for line in told if line["MB"] > 200] == []
