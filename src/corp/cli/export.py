"""corp export: a pruned model in a form that its own library loads."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from corp.cli import options as o
from corp.cli.console import command, note, show_json, show_table
from corp.errors import CorpError, StorageError
from corp.storage import folder as storage


@command
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that corp prune or corp.save wrote.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist.")],
    to: Annotated[
        str | None,
        typer.Option(
            help="timm, hf: as that library saves its models. onnx: for ONNX Runtime. pt2: torch.export's format. "
            "vllm, gguf: a Llama, Mistral, Qwen2 or Phi-3 with layers of different widths, for vLLM or llama.cpp.",
            show_default="the model's own library",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Of timm and hf. standard: narrower MLPs in the config, the rest padded with zeros. "
            "compat: everything padded to the dense shapes.",
            show_default="standard",
        ),
    ] = None,
    quant: Annotated[
        str | None,
        typer.Option(help="Of gguf: f32, f16, bf16 or q8_0.", show_default="the model's own precision"),
    ] = None,
    overwrite: o.Overwrite = False,
    json: o.Json = False,
) -> None:
    """Write a pruned model so that it loads without corp, and check that it computes the same."""
    written_by = shlex.join(["corp", *sys.argv[1:]])
    try:
        made = storage.export(folder, out, to=to, profile=profile, quant=quant, overwrite=overwrite, command=written_by)
    except StorageError:
        _note_possible(folder)
        raise
    if made.difference is None:
        package = {"gguf": "xllamacpp"}.get(made.target, "'corp-prune[onnx]'")
        note(f"not compared with the pruned model: {made.library} is not installed (pip install {package})")
    for text in made.notes:
        note(text)
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
    note(f"saved to {out}; {_loading(made.load)}")


def _note_possible(folder: Path) -> None:
    """After a refusal: where else this model can go."""
    with suppress(CorpError):
        flags = [
            "--profile compat" if target == "compat" else f"--to {target}"
            for target, reason in storage.exports(folder).items()
            if reason is None
        ]
        note(f"this model can be exported with {', '.join(flags)}")


def _loading(lines: str) -> str:
    """How to load it: the expression, out of the lines that users would write, or the command."""
    line = next((line for line in lines.splitlines() if line.startswith(("model = ", "session = "))), None)
    return f"run it with {lines}" if line is None else f"load it with {line.partition(' = ')[2]}"
