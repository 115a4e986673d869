"""The output of commands: tables and progress for people, JSON for programs, one line for errors."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, ParamSpec

import typer
from rich.console import Console as Terminal
from rich.table import Table
from rich.text import Text

from corp.cli.expand import flag
from corp.errors import CorpError, CorpWarning
from corp.io.observer import Advance, Bars, Observer
from corp.recipe import Recipe

P = ParamSpec("P")
INTERNAL = 70  # the exit code of a defect, as in sysexits.h
# What an interrupted command leaves behind, and how to continue.
_KEPT = {
    "calibrate": "the last checkpoint is kept; start the same command again to continue",
    "sweep": "with -o, finished cases are kept; start the same command again to continue",
    "prune": "no output was written; to keep the data pass, use `corp calibrate -o STATS`, then `--stats STATS`",
}
_NOTHING = "no output was written; start the command again"
# Python arguments that are not fields of the recipe, and their names on the command line.
_ARGUMENTS = {
    "field": "--text-field", "scale": "--depth-scale", "ignore": "--ignore", "checkpoint_seconds": "--checkpoint-every",
    **{name: flag(name) for name in (
        "weights", "tokenizer", "samples", "memory", "offload", "device", "dtype", "seed", "overwrite", "profile",
        "fresh", "to", "quant", "labels", "seq_len", "batch_size", "max_bad", "sparsity",
    )},
}  # fmt: skip
_NO_MEMORY = ("allocate memory", "not enough memory", "out of memory", "failed to map segment", "start new thread")
out = Terminal()
err = Terminal(stderr=True)
_stopped: list[int] = []  # the signals received


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Turn a function into a command: an error is one message and an exit code, a warning is one line."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", CorpWarning)
        with told(_KEPT.get(function.__name__, _NOTHING)):
            function(*args, **kwargs)

    return wrapped


@contextmanager
def told(kept: str = _NOTHING) -> Iterator[None]:
    """Report whatever ends a command in one line, with an exit code; `kept` is what an interrupted one leaves."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:  # the reader of our output went away (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _fail(f"interrupted; {kept}", 130)
    except Exception as error:
        if interrupted():
            _fail(f"interrupted; {kept}", 128 + _stopped[0])
        if os.environ.get("CORP_DEBUG"):
            raise
        _fail(*_explained(error))


def interrupted() -> bool:
    """Whether a signal came: libraries turn what it raises inside them into errors of their own."""
    return bool(_stopped)


def heed_signals() -> None:
    """Let Ctrl-C and SIGTERM unwind the command, so that half-written folders are removed on the way out."""

    def stop(number: int, _frame: FrameType | None) -> None:
        _stopped.append(number)
        if _stopped[0] == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + _stopped[0])

    def swallowed(what: sys.UnraisableHookArgs) -> None:
        if _stopped and isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # a destructor lost the exception: repeat it soon
        else:
            sys.__unraisablehook__(what)

    if hasattr(signal, "setitimer"):  # not on Windows
        sys.unraisablehook = swallowed
        signal.signal(signal.SIGALRM, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background jobs ignore Ctrl-C
            signal.signal(number, stop)


def ignore_signals() -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _explained(error: Exception) -> tuple[str, int]:
    """The message and the exit code of an error."""
    text = str(error)
    if "No space left" in text or "os error 28" in text or getattr(error, "errno", None) == errno.ENOSPC:
        return f"the disk is full: {text}. Free some space, or write elsewhere with -o; nothing was left behind", 1
    if isinstance(error, CorpError):
        return in_flags(text), 1
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("corp."):  # otherwise it is a defect
        return f"{error.name} is not installed: pip install 'corp-prune[all]'", 1
    if isinstance(error, MemoryError) or any(sign in text for sign in _NO_MEMORY):  # of torch, a RuntimeError
        return "out of memory; use a smaller --batch-size or fewer --samples", 1
    if isinstance(error, OSError):
        return f"{error.filename or 'the system says'}: {error.strerror or error}", 1
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}, line {where.lineno}"
    return (
        f"internal error: {type(error).__name__}: {text} ({place}). This is a defect of corp: please report it with "
        f"the output of the same command under CORP_DEBUG=1",
        INTERNAL,
    )


def in_flags(text: str) -> str:
    """The text with Python arguments, such as target_macs=0.5, spelled as options of the command line."""
    flags = {f.name: flag(f.name) for f in fields(Recipe)} | _ARGUMENTS
    text = text.replace("pass out=...", "run corp calibrate -o STATS, then give --stats STATS")
    text = text.replace("corp.prune_streamed", "--stream")
    text = re.sub(r"\bcorp\.(prune|plan|calibrate)\b(\([^)]*\))?", r"corp \1", text)
    values = r"\[[^\]]*\]|'[^']*'|[^\s,;:)]+"
    given = rf"(--\S+ )?(?<![^\s(])({'|'.join(flags)})=({values})"  # mlp=64 after --round-to is spelled that way
    text = re.sub(given, lambda found: found[0] if found[1] else _with_value(flags[found[2]], found[3]), text)
    bare = "|".join(name for name in flags if "_" in name)
    return re.sub(rf"(?<![\w.'-])({bare}|overrides)\b", lambda found: flags[found[1]], text)


def _with_value(option: str, value: str) -> str:
    """An option and its value as they are typed; True and False are switches."""
    if option == "--intercept" and value in ("True", "False"):
        return f"{option} {'yes' if value == 'True' else 'no'}"
    if value in ("True", "False"):
        return option if value == "True" else option.replace("--", "--no-", 1)
    return f"{option} {value.strip('[]').replace(chr(39), '')}"


def _fail(message: str, code: int) -> NoReturn:
    err.print(Text.assemble(("error: ", "bold red"), printable(message)), soft_wrap=True)
    raise typer.Exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, CorpWarning):
        err.print(Text.assemble(("warning: ", "bold yellow"), printable(in_flags(str(message)))), soft_wrap=True)


def printable(text: str) -> str:
    """The text with control characters escaped: names may come from untrusted files, and could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def note(message: str) -> None:
    """Print one line for people, on stderr."""
    err.print(Text(printable(message), style="dim"), soft_wrap=True)


def show_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=1))


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    terminal = out if out.is_terminal else Terminal(width=160)
    terminal.print(Text(printable(title), style="italic"), soft_wrap=True)  # not the table's: that wraps at its width
    table = Table(header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # Text, so that names are never interpreted as markup
    terminal.print(table)


class Console(Bars):
    """Shows a run at a terminal: bars, and notes in the spelling of the command line."""

    def __init__(self) -> None:
        super().__init__(err)

    def note(self, message: str) -> None:
        note(in_flags(message))

    def finished(self, gained: str) -> None:
        """Print nothing: the command prints the last line, because it knows where the result is."""


@contextmanager
def progress(what: str, total: int | None, unit: str, *, quiet: bool = False) -> Iterator[Advance]:
    """Show a bar with rate and time left on a terminal; without a total, the elapsed time."""
    with (Observer() if quiet else Console()).stage(what, total, unit) as advance:
        yield advance
