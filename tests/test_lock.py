"""Pins and their hashes agree: an archive that was changed on its way is refused by make LOCKED=1."""

from __future__ import annotations

import re

from scripts.lock import LOCKED, PINS, locked, pins, problems


def test_every_hash_is_of_a_pinned_version() -> None:
    assert problems(PINS.read_text(), LOCKED.read_text()) == []
    lines = [line for line in LOCKED.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert {"torch", "transformers", "timm", "safetensors", "pillow"} <= set(pins(LOCKED.read_text()))


def test_a_version_that_moved_is_noticed() -> None:
    assert problems("timm==1.0.31\n", "timm==1.0.30 --hash=sha256:00\n") == [
        "timm: 1.0.30 has a hash, 1.0.31 is pinned"
    ]
    assert problems("", "Evil_Name==1 --hash=sha256:00\n") == ["evil-name: 1 has a hash, None is pinned"]
    assert problems("torch==2.13.0\n", "torch==2.13.0+cpu --hash=sha256:00\n") == []


def test_what_pip_reports_becomes_a_line() -> None:
    item = {
        "metadata": {"name": "Some_Package", "version": "1.2"},
        "download_info": {"archive_info": {"hashes": {"sha256": "ab" * 32}}},
    }
    assert locked([item]).splitlines()[1] == f"some-package==1.2 --hash=sha256:{'ab' * 32}"
