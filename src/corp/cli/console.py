"""What the commands print: tables and progress for people, JSON for machines, one line for errors."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from corp.errors import CorpError, CorpWarning

P = ParamSpec("P")
out = Console()
err = Console(stderr=True)


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Errors become one message and an exit code; warnings one line each; nobody sees a traceback."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", CorpWarning)
        try:
            function(*args, **kwargs)
        except CorpError as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            _fail("interrupted; no output was written (corp calibrate goes on where it was when started again)", 130)
        except ModuleNotFoundError as error:
            _fail(f"{error.name} is not installed: pip install 'corp-prune[all]'", 1)
        except MemoryError:
            _fail("out of memory; use a smaller --batch-size or fewer --samples", 1)
        except BrokenPipeError:  # the reader of our output went away (`| head`)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    return wrapped


def _fail(message: str, code: int) -> None:
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, CorpWarning):
        err.print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)


def note(message: str) -> None:
    """One line to people, beside the output proper."""
    err.print(Text(message, style="dim"), soft_wrap=True)


def show_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=1))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: names are never read as markup
    (out if out.is_terminal else Console(width=160)).print(table)


class _Rate(ProgressColumn):
    """Finished per second, over the whole run."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f} {self.unit}/s" if task.speed else "")


@contextmanager
def progress(what: str, total: int | None, unit: str, *, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left on a terminal; silent elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(unit), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=quiet or not err.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)
