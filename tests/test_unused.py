"""The script that lists what nobody uses finds it, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "unused.py"
FIRST = """
LIMIT, SPARE = 3, 4

def used(a, b=1, c=2):
    return a + LIMIT

def unused():
    return used(1, 2)

class Thing:
    def touched(self): ...
    def untouched(self): ...
    def shown(self): ...
"""
SECOND = """
from package import first
print(first.used(1, b=3), first.Thing().touched())
"""


def test_only_what_nobody_uses_is_listed(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("first.py", FIRST), ("second.py", SECOND), ("page.html", "{{ thing.shown() }}")):
        (package / name).write_text(text)
    listed = subprocess.run([sys.executable, SCRIPT, package], capture_output=True, text=True, check=True).stdout
    assert [line.rpartition(": ")[2] for line in listed.splitlines()] == [
        "SPARE",
        "unused",
        "Thing.untouched",
        "used(c=)",
    ]
