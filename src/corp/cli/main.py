"""The `corp` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from corp import __version__
from corp.cli.analyze import analyze
from corp.cli.bench import bench
from corp.cli.calibrate import calibrate
from corp.cli.check import check
from corp.cli.console import heed_signals, ignore_signals, told
from corp.cli.demo import demo
from corp.cli.eval import evaluate
from corp.cli.export import export
from corp.cli.inspect import inspect
from corp.cli.merge import merge
from corp.cli.plan import plan
from corp.cli.probe import probe
from corp.cli.prune import prune
from corp.cli.report import report
from corp.cli.sweep import sweep

app = typer.Typer(
    name="corp",
    help="Make pretrained Transformers smaller and faster, in closed form, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(prune)
app.command()(plan)
app.command()(calibrate)
app.command()(merge)
app.command()(sweep)
app.command("eval")(evaluate)
app.command()(probe)
app.command()(analyze)
app.command()(bench)
app.command()(export)
app.command()(inspect)
app.command()(check)
app.command()(report)
app.command()(demo)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"corp {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


def main() -> None:
    heed_signals()
    try:
        with told():  # what happens before a command has begun, too
            app()
    except typer.Exit as end:
        sys.exit(end.exit_code)
    finally:  # what comes now is only the end of the interpreter: it must not turn a success into an interruption
        ignore_signals()
