"""On the platform of the record, results have the recorded bits: a change of any is deliberate (scripts/bits.py)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.bits import BITS, reference
from scripts.golden import GOLDEN

RECORD = json.loads(BITS.read_text(encoding="utf-8"))


def test_results_have_the_recorded_bits() -> None:
    """They are made in a process of their own: what other tests leave behind can change how sums are rounded."""
    here = reference()
    if here != RECORD["reference"]:
        pytest.skip(f"bits were recorded on {RECORD['reference']}, this is {here}")
    command = [sys.executable, "-m", "scripts.bits", "--show"]
    shown = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True, check=True)
    found = json.loads(shown.stdout)["made"]
    assert found == RECORD["made"], "meant to change? run python -m scripts.bits, and say so in CHANGELOG.md"
