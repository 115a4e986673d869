"""Names that a mistyped one may have meant, by prefix and edit distance together."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 4


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that `name` may stand for, best first.

    A known name counts by the edits that turn `name` into some beginning of it: who types `deit_tinny` means
    `deit_tiny_patch16_224`, though most of that is missing. Among equals, shorter names come first.
    """
    allowed = max(2, len(name) // 4)
    found = [(prefix_distance(name.lower(), other.lower()), len(other), other) for other in known]
    return [other for edits, _, other in sorted(found) if edits <= allowed][:MOST]


def prefix_distance(name: str, other: str) -> int:
    """The fewest insertions, deletions and replacements that turn `name` into a prefix of `other`."""
    row = list(range(len(other) + 1))  # edits from the name's beginning to every prefix of the other
    for i, letter in enumerate(name, start=1):
        above, row[0] = row[0], i
        for j, there in enumerate(other, start=1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (letter != there))
    return min(row)
