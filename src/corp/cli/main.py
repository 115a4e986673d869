"""The `corp` command: a table of its commands, whose modules are imported when they are used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from corp import __version__
from corp.cli.console import heed_signals, ignore_signals, told


class Entry:
    """One command, in the module and function of its name: what it does in one line, and examples."""

    def __init__(self, summary: str, *examples: str) -> None:
        self.summary, self.examples = summary, examples


COMMANDS = {
    "prune": Entry(
        "Make a smaller model: calibrate on unlabelled images or texts, remove, compensate, save.",
        "corp prune deit_tiny_patch16_224 --calib photos/ --target-macs 0.6 -o small/",
        "corp prune hf:opt-125m/ --calib texts.jsonl --mlp 0.3 -o small/",
        "corp prune deit_tiny_patch16_224 --stats stats/ --sparsity 0.5 --preset paper -o small/",
    ),
    "plan": Entry(
        "Show what pruning would keep and cost, site by site, without changing anything.",
        "corp plan deit_tiny_patch16_224 --stats stats/ --target-macs 0.6",
        "corp plan deit_tiny_patch16_224 --calib photos/ --sparsity 0.5 -o plan.json",
    ),
    "calibrate": Entry(
        "Collect the statistics that plan, prune, sweep and analyze need, once.",
        "corp calibrate deit_tiny_patch16_224 --calib photos/ -o stats/",
        "corp calibrate hf:opt-125m/ --calib texts.jsonl --samples 256 --memory 4GB -o stats/",
    ),
    "merge": Entry(
        "Add the statistics of several folders into one.",
        "corp merge stats-1/ stats-2/ -o stats/",
    ),
    "sweep": Entry(
        "Try many recipes from one calibration, and measure each.",
        "corp sweep deit_tiny_patch16_224 --calib photos/ --data labelled/ --sparsity 0.1:0.7:0.1 -o sweep/",
    ),
    "eval": Entry(
        "Measure models on the same data: accuracy, perplexity, closeness to the dense model.",
        "corp eval small/ --dense deit_tiny_patch16_224 --data labelled/",
        "corp eval hf:opt-125m/ small/ --data test.txt",
        "corp eval small/ --dense vit_small_patch14_dinov2 --head head.safetensors --data scenes/",
    ),
    "probe": Entry(
        "Fit a linear head for segmentation or depth on a frozen backbone, in closed form.",
        "corp probe vit_small_patch14_dinov2 --data scenes/ --image-size 336x448 -o head.safetensors",
    ),
    "analyze": Entry(
        "Show how redundant every layer is.",
        "corp analyze deit_tiny_patch16_224 --calib photos/ -o redundancy/",
    ),
    "bench": Entry(
        "Measure the speed of models against the first one, or of a pruned folder against its dense model.",
        "corp bench small/",
        "corp bench deit_tiny_patch16_224 small/ --batch 8 --threads 1",
    ),
    "export": Entry(
        "Write a pruned model for use without corp: timm, transformers, ONNX, PT2, vLLM or GGUF.",
        "corp export small/ --to onnx -o onnx-model/",
        "corp export small/ --profile compat -o timm-model/",
        "corp export small/ --to gguf -o gguf-model/",
    ),
    "inspect": Entry(
        "Show what can be pruned in a model, what cannot and why, or what was done to a saved folder.",
        "corp inspect deit_tiny_patch16_224",
        "corp inspect small/ --json",
    ),
    "check": Entry(
        "Check on your own data that a pruned model computes what its plan predicts.",
        "corp check small/ --calib photos/",
    ),
    "report": Entry(
        "Write one self-contained HTML page about runs: what was removed, what it cost, how to repeat it.",
        "corp report small/ sweep/ -o report.html",
    ),
    "demo": Entry(
        "Prune a built-in model at several sparsities; no download, about half a minute.",
        "corp demo",
    ),
}


def load_command(name: str) -> Any:
    """The click command of a row of the table, with its module imported."""
    entry = COMMANDS[name]
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    examples = "Examples:\n\n" + "\n".join(f"  {line}" for line in entry.examples)
    function = getattr(import_module(f"corp.cli.{name}"), "evaluate" if name == "eval" else name)
    alone.command(name, epilog=examples)(function)
    made: Any = typer.main.get_command(alone)
    for parameter in made.params:  # --help shows MODEL, no type for a switch, and the type of a list's values
        if parameter.param_type_name == "argument":
            parameter.metavar = parameter.name.upper()
        elif parameter.is_flag:
            parameter.metavar = ""
        elif parameter.multiple:
            parameter.metavar = "<glob>" if parameter.name in ("skip", "override") else "<path>"
    return made


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them, and imports only the chosen one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="corp",
    cls=LazyGroup,
    help="Make pretrained Transformers smaller and faster, in closed form, without training.",
    epilog="Every command has examples: corp prune --help",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


for _name, _entry in COMMANDS.items():  # listed by `corp --help`, and replaced when they are used
    app.command(_name, help=_entry.summary)(lambda: None)


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
        with told():  # also covers errors before a command has begun
            app()
    except typer.Exit as end:
        sys.exit(end.exit_code)
    finally:  # a signal while the interpreter shuts down must not turn a success into an interruption
        ignore_signals()
