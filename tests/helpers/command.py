"""The command line as tests call it."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from corp.cli.main import app


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def content(*args: object) -> dict[str, Any]:
    """What a command that must succeed prints with --json."""
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def failure(*args: object) -> str:
    """What a command that must fail says, in one line."""
    result = run(*args)
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())
