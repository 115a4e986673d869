"""corp export: writes a pruned model in a format that other programs load."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, interrupted, note, progress, show_json, show_table
from corp.errors import CorpError, StorageError


@command
def export(
    folder: a.PrunedFolder,
    out: a.OutFolder,
    to: Annotated[
        Literal["timm", "hf", "onnx", "pt2", "vllm", "gguf"] | None,
        a.option(
            "Format to write. timm, hf: what that library saves. onnx: ONNX Runtime. pt2: torch.export. vllm, gguf: "
            "vLLM and llama.cpp, for Llama, Mistral, Qwen2 and Phi-3, whose layers may differ in width.",
            a.OUTPUT,
            show_default="the model's own library",
        ),
    ] = None,
    profile: Annotated[
        Literal["standard", "compat"] | None,
        a.option(
            "For timm and hf. standard: narrower MLPs in the config, the rest padded with zeros. "
            "compat: everything padded to the dense shapes.",
            a.OUTPUT,
            show_default="standard",
        ),
    ] = None,
    quant: Annotated[
        str | None,  # not a choice, because the error for other values names the tool that makes them
        a.option("Number format of a gguf file: f32, f16, bf16 or q8_0.", a.OUTPUT, show_default="the model's own"),
    ] = None,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Write a pruned model so that it loads without corp, and check that it computes the same."""
    from corp.storage import folder as storage

    early.require_output(out, overwrite=overwrite)
    line = shlex.join(["corp", *sys.argv[1:]])
    try:
        with progress(f"exporting {folder}", None, "", quiet=json):
            made = storage.export(folder, out, to=to, profile=profile, quant=quant, overwrite=overwrite, command=line)
    except StorageError:
        if not interrupted():
            _note_possible(folder, refused=to)
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
    ]
    if made.companions or made.target in ("hf", "vllm", "gguf"):
        rows.append(("tokenizer, preprocessing", ", ".join(made.companions) or "none found"))
    form = f"{made.profile} profile" if made.profile else made.target
    show_table(f"{out}, {form}", ("", made.library), rows)
    note(f"saved to {out}; {_loading(made.load)}")


def _note_possible(folder: Path, refused: str | None) -> None:
    """After a refusal, list the formats to which this model can be exported."""
    from corp.storage import folder as storage

    with suppress(CorpError):
        flags = [
            "--profile compat" if target == "compat" else f"--to {target}"
            for target, reason in storage.exports(folder).items()
            if reason is None and target != refused  # for example, the tokenizer may be the reason
        ]
        note(f"this model can be exported with {', '.join(flags)}")


def _loading(lines: str) -> str:
    """How to load it: the expression from the lines of code, or the command."""
    line = next((line for line in lines.splitlines() if line.startswith(("model = ", "session = "))), None)
    return f"run it with {lines}" if line is None else f"load it with {line.partition(' = ')[2]}"
