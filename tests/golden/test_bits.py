"""On the platform of the record, results have the recorded bits: a change of any is deliberate (scripts/bits.py)."""

from __future__ import annotations

import json

import pytest

from scripts.bits import BITS, made, reference

RECORD = json.loads(BITS.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_results_have_the_recorded_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as users run it, with every default
    here = reference()
    if here != RECORD["reference"]:
        pytest.skip(f"bits were recorded on {RECORD['reference']}, this is {here}")
    assert made() == RECORD["made"], "meant to change? run python -m scripts.bits, and say so in CHANGELOG.md"
