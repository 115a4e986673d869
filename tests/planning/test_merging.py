"""The record of merged tokens: what it refuses, with which words, and that it survives JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corp.errors import PlanError
from corp.planning.merging import Merging


@pytest.mark.parametrize(
    "merging",
    [
        Merging("blocks", (0, 3), 0),
        Merging("blocks", (3, 0), 1, read=1),
        Merging("blocks", (3, 0), 2, read=1),
        Merging("vit.layers", (2, 2), 5, unmerge=True),
    ],
)
def test_a_record_survives_json(merging: Merging) -> None:
    assert Merging.from_dict(json.loads(json.dumps(merging.to_dict()))) == merging


def test_only_blocks_schedule_and_prefix_are_needed() -> None:
    made = Merging.from_dict({"blocks": "blocks", "schedule": [2, 0], "prefix": 1})
    assert (made.schedule, made.read, made.unmerge) == ((2, 0), None, False)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prefix": -1}, r"prefix has -1, which is not a whole number >= 0"),
        ({"prefix": True}, r"prefix has True"),
        ({"prefix": 1.0}, r"prefix has 1\.0"),
        ({"read": 0}, r"read has 0, which is not a whole number >= 1"),
        ({"schedule": (2, -1)}, r"schedule has -1, which is not a whole number >= 0"),
        ({"schedule": (True, 0)}, r"schedule has True"),
        ({"schedule": ()}, r"schedule a number per block"),
        ({"blocks": 3}, r"blocks is a module's name"),
        ({"unmerge": 1}, r"unmerge True or False"),
        ({"read": 1, "unmerge": True}, r"computes 1 tokens has nothing to merge or unmerge"),
        ({"read": 2}, r"read is at most prefix \(1\)"),
        ({"read": 1, "schedule": (2, 1)}, r"schedule ends in 0"),
    ],
)
def test_what_cannot_be_merged_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Merging(**{"blocks": "blocks", "schedule": (3, 0), "prefix": 1, **wrong})


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, r"merging is a JSON object with .*, not None"),
        ([], r"a JSON object with blocks, prefix, read, schedule, unmerge, not \[\]"),
        ({"blocks": "blocks", "prefix": 1}, r"merging is a JSON object"),
        ({"blocks": "blocks", "schedule": [1], "prefix": 1, "other": 1}, r"merging is a JSON object"),
        ({"blocks": "blocks", "schedule": 3, "prefix": 1}, r"schedule is a list of numbers, not 3"),
        ({"blocks": "blocks", "schedule": "11", "prefix": 1}, r"schedule is a list of numbers, not '11'"),
    ],
)
def test_files_that_hold_no_record_are_refused(raw: object, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Merging.from_dict(raw)
