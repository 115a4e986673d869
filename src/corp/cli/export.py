"""corp export: a pruned model in a form that its own library loads."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from corp import storage
from corp.cli import options as o
from corp.cli.console import command, note, show_json, show_table
from corp.errors import StorageError


@command
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that corp prune or corp.save wrote.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
    profile: Annotated[
        str,
        typer.Option(
            help="standard: narrower MLPs in the config, pruned Q/K padded with zeros. "
            "compat: everything padded to the dense shapes."
        ),
    ] = "standard",
    to: Annotated[str, typer.Option(help="hf: as the model's own library saves it; all there is.")] = "hf",
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Write a pruned model so that it loads without corp, and check that it computes the same."""
    if to != "hf":
        raise StorageError(f"--to {to} is not known; hf is")
    made = storage.export(
        folder, out, profile=profile, overwrite=overwrite, command=shlex.join(["corp", *sys.argv[1:]])
    )
    if json:
        show_json({"output": str(out), **made.to_dict()})
        return
    pruned, written = made.params
    rows = [
        ("parameters of the pruned model", f"{pruned / 1e6:.3f} M"),
        ("parameters as written", f"{written / 1e6:.3f} M"),
        ("largest difference of outputs", f"{made.difference:.1e}"),
        ("tokenizer, preprocessing", ", ".join(made.companions) or "none found"),
    ]
    show_table(f"{out}, {made.profile} profile", ("", made.library), rows)
    note(f"saved to {out}; load it with {made.load.splitlines()[-1].removeprefix('model = ')}")
