"""Suggestions for a mistyped name, by prefix and edit distance together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

MOST = 4


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that `name` may mean, best first.

    A known name is ranked by the edits that turn `name` into a prefix of it: `deit_tinny` means
    `deit_tiny_patch16_224`, though most of that is missing. Among equals, shorter names come first.
    """
    allowed = 1 if len(name) < 5 else max(2, len(name) // 4)
    found = [(prefix_distance(name.lower(), other.lower()), len(other), other) for other in known]
    return [other for edits, _, other in sorted(found) if edits <= allowed][:MOST]


def beside(path: Path) -> list[Path]:
    """The files and folders beside a missing path that it may mean, best first."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    return [path.parent / name for name in near(path.name, names)]


def did_you_mean(names: Iterable[object]) -> str:
    """The end of a sentence that suggests the names; nothing if there are none."""
    shown = ", ".join(map(str, names))
    return f"; did you mean {shown}?" if shown else ""


def prefix_distance(name: str, other: str) -> int:
    """The fewest insertions, deletions and replacements that turn `name` into a prefix of `other`."""
    row = list(range(len(other) + 1))  # edits from the name's beginning to every prefix of the other
    for i, letter in enumerate(name, start=1):
        above, row[0] = row[0], i
        for j, there in enumerate(other, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != there))
    return min(row)
