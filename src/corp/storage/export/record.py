"""The record of an export: how it is loaded, how far it is from the pruned model, and its model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from corp import __version__
from corp.io.files import write_json
from corp.planning.plan import Plan

RECORD, CARD = "corp-export.json", "README.md"


class Written(NamedTuple):
    """What a target's writer reports about its files."""

    load: Callable[[str], str]  # the lines that load them, from the name of their folder
    params: int
    difference: float | None
    companions: Sequence[str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What was written: how it is loaded, and how far its outputs are from the pruned model's."""

    target: str
    profile: str | None  # of targets that are a library's own format
    library: str
    load: str  # the lines that load it
    params: tuple[int, int]  # of the pruned model, and as written
    difference: float | None  # the largest, relative to the largest output; None if it could not be checked
    companions: tuple[str, ...]
    notes: tuple[str, ...] = ()  # anything unexpected: padding, checks that were not run

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "params": {"pruned": self.params[0], "written": self.params[1]}}


def write_record(folder: Path, name: str, made: Exported, record: dict[str, Any], plans: Sequence[Plan]) -> None:
    """Write corp-export.json for programs, and a model card; `name` is the folder's final name."""
    content = {"format": "corp-export", "version": 1, "corp": __version__, **made.to_dict(), **record}
    content["plans"] = [plan.to_dict() for plan in plans]
    write_json(folder / RECORD, content)
    (folder / CARD).write_text(_card(name, made, plans), encoding="utf-8")


def _card(name: str, made: Exported, plans: Sequence[Plan]) -> str:
    recipe = ", ".join(f"{key}={value!r}" for key, value in plans[-1].recipe.to_dict().items() if value)
    form = f"Profile `{made.profile}`" if made.profile else f"Form `{made.target}`"
    return f"""---
library_name: {made.library}
tags: [pruned]
---
# {name}, pruned

Made with corp {__version__} from {plans[-1].samples} unlabelled calibration samples, in closed form: no training, no
labels. Recipe: {recipe}.

{form}: it loads without corp. {_shape(made)}

```{"python" if " = " in made.load else "sh"}
{made.load}
```

{_checked(made)}{"".join(f" Note: {note}." for note in made.notes)}
"""


def _shape(made: Exported) -> str:
    pruned, written = made.params
    if pruned == written:
        return f"It has {written:,} parameters, none of them padding."
    return f"It holds {written:,} parameters, zeros where something was removed; {pruned:,} are the pruned model's own."


def _checked(made: Exported) -> str:
    if made.difference is None:
        return f"Its outputs were not compared with the pruned model's: {made.library} was not installed."
    return (
        "Its outputs were compared with the pruned model's when it was written: the largest difference was\n"
        f"{made.difference:.1e} of the largest output."
    )
