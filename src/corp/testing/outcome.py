"""What became of the contract on one model: its rows, and the table that they make."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from corp.errors import ModelError
from corp.io.tables import Tabular

WIDE = 96  # characters of a detail in one line of the table


@dataclass(frozen=True)
class Row:
    """One line of the contract: what was tried, whether it held, and the numbers or the reason.

    A step that needs what an earlier one did not give is not `ran`, and has not passed.
    """

    name: str
    passed: bool
    detail: str
    ran: bool = True

    @property
    def state(self) -> str:
        return "ok" if self.passed else "FAILED" if self.ran else "not run"


@dataclass(frozen=True, repr=False)
class Contract(Tabular):
    """What became of the contract on one model: iterate over it for its rows; `passed` if every one of them did."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that ran and did not hold."""
        return tuple(row for row in self.rows if row.ran and not row.passed)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        broken = ", ".join(row.name for row in self.failed)
        title = "the contract holds" if self.passed else f"the contract does not hold: {broken}"
        return title, ("contract", "", "detail"), [line for row in self.rows for line in _lines(row)]

    def require(self) -> None:
        """Raise an error that holds the table, unless the contract holds."""
        if not self.passed:
            raise ModelError(str(self))


def _lines(row: Row) -> list[tuple[str, ...]]:
    """A row in as many lines as its detail needs."""
    first, *more = textwrap.wrap(row.detail, WIDE) or [""]
    return [(row.name, row.state, first), *(("", "", line) for line in more)]
