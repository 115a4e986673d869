"""Write docs/cli.md, the reference of the command line, from the options themselves."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from corp.cli.main import COMMANDS, load_command
from corp.io.tables import markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# The command line

Made by `python -m scripts.cli_page` from the commands themselves; a test fails if it is out of date.
`corp --install-completion` lets your shell complete commands, options and values.
"""


def page() -> str:
    return "\n".join([HEAD, *(section(name) for name in COMMANDS)])


def section(name: str) -> str:
    """One command: what it does, how it is called, its options panel by panel."""
    command: Any = load_command(name)
    examples = "\n".join(COMMANDS[name].examples)
    parts = [f"## corp {name}", inspect.cleandoc(command.help or ""), f"```sh\n{examples}\n```"]
    panels: dict[str, list[list[str]]] = {}
    for param in command.params:
        panels.setdefault(_panel(param), []).append([_spelled(param), param.help or "", _default(param)])
    for panel, rows in panels.items():
        parts += [f"**{panel}**", markdown_table(("option", "", "default"), rows)]
    return "\n\n".join(parts) + "\n"


def _panel(param: Any) -> str:
    return param.rich_help_panel or ("Arguments" if param.param_type_name == "argument" else "Options")


def _spelled(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{param.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    """What --help shows as the default."""
    if param.required:
        return "required"
    if isinstance(param.show_default, str):
        return param.show_default
    return "" if param.default is None or param.default is False or param.default == [] else str(param.default)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
