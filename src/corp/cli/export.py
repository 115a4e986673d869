"""corp export: a pruned model in a form that its own library loads."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

from corp.cli import arguments as a
from corp.cli.console import command, note, progress, show_json, show_table


@command
def export(
    folder: a.PrunedFolder,
    out: a.OutFolder,
    to: Annotated[
        str | None,
        a.option(
            "timm, hf: as that library saves its models. onnx: for ONNX Runtime. pt2: torch.export's format.",
            a.OUTPUT,
            show_default="the model's own library",
            autocompletion=lambda: ["timm", "hf", "onnx", "pt2"],
        ),
    ] = None,
    profile: Annotated[
        str | None,
        a.option(
            "For timm and hf. standard: narrower MLPs in the config, the rest padded with zeros. "
            "compat: everything padded to the dense shapes.",
            a.OUTPUT,
            show_default="standard",
            autocompletion=lambda: ["standard", "compat"],
        ),
    ] = None,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Write a pruned model so that it loads without corp, and check that it computes the same."""
    from corp.cli.inputs import require_output
    from corp.storage import folder as storage

    require_output(out, overwrite=overwrite)
    line = shlex.join(["corp", *sys.argv[1:]])
    with progress(f"exporting {folder}", None, "", quiet=json):
        made = storage.export(folder, out, to=to, profile=profile, overwrite=overwrite, command=line)
    if made.difference is None:
        note(f"not compared with the pruned model: {made.library} is not installed (pip install 'corp-prune[onnx]')")
    if json:
        show_json({"output": str(out), **made.to_dict()})
        return
    pruned, written = made.params
    rows = [
        ("parameters of the pruned model", f"{pruned / 1e6:.3f} M"),
        ("parameters as written", f"{written / 1e6:.3f} M"),
        ("largest difference of outputs", "not checked" if made.difference is None else f"{made.difference:.1e}"),
        ("tokenizer, preprocessing", ", ".join(made.companions) or "none found"),
    ]
    form = f"{made.profile} profile" if made.profile else made.target
    show_table(f"{out}, {form}", ("", made.library), rows)
    note(f"saved to {out}; load it with {_loading(made.load)}")


def _loading(lines: str) -> str:
    """The expression that loads it, out of the lines that users would write."""
    line = next(line for line in lines.splitlines() if line.startswith(("model = ", "session = ")))
    return line.partition(" = ")[2]
