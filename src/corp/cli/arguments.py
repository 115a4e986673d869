"""The options that commands share, each defined once: dataclasses whose fields have their help, panel and default.

`corp.cli.expand` turns them into options. Nothing heavy is imported here, so that `--help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from corp.errors import RecipeError
from corp.recipe import BUDGET as BUDGET
from corp.recipe import HOW as HOW
from corp.recipe import REMOVE as REMOVE

if TYPE_CHECKING:
    from corp.calibration.settings import Settings

DATA, MACHINE, OUTPUT = "Model and data", "Machine", "Output"
PANELS = (DATA, REMOVE, HOW, BUDGET, MACHINE, OUTPUT)  # in this order in every --help
# The most used options of prune and plan; they are listed above all panels.
FIRST = (
    "calib", "out", "sparsity", "target_macs", "target_params", "min_agreement", "mlp", "attn", "preset", "weights",
    "samples",
)  # fmt: skip
IMAGES = 4000  # calibration images, unless --samples is given


def option(text: str, panel: str, *spelled: str, **extra: Any) -> Any:
    return typer.Option(*spelled, help=text, rich_help_panel=panel, **extra)


def parse_number(text: str, kind: Callable[[str], Any], option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"{option}: {text!r} is not a number") from None


Model = Annotated[str, typer.Argument(help="A timm name, hf:FOLDER or hf:HUB-ID, or a folder that corp saved.")]
Weights = Annotated[
    Path | None,
    option(
        "Weights file of a timm model: .safetensors, or .pth (weights only).",
        DATA,
        show_default="timm's pretrained weights",
    ),
]
Stats = Annotated[Path | None, option("Statistics from corp calibrate, instead of --calib.", DATA)]
MaxBad = Annotated[float, option("Share of unreadable images to tolerate; corp lists them.", DATA)]
BatchSize = Annotated[
    int | None, option("Samples per forward pass.", MACHINE, min=1, show_default="32 images, or 8192 tokens")
]
Device = Annotated[
    str,
    option(
        "Where the model runs: cpu, cuda, cuda:1, mps, or auto.",
        MACHINE,
        autocompletion=lambda: ["auto", "cpu", "cuda", "mps"],
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    option("Number format of the forward pass; the result is never wider than the checkpoint.", MACHINE),
]
Labels = Annotated[
    str | None,
    typer.Option(help="CSV of file,label, or none for no labels.", show_default="sub-folders or synset ids"),
]
OutFolder = Annotated[Path, option("Folder to write; it must not exist.", OUTPUT, "--out", "-o")]
Overwrite = Annotated[bool, option("Replace the output if it exists.", OUTPUT, "--overwrite")]
Json = Annotated[bool, option("Print JSON instead of tables.", OUTPUT, "--json")]
PrunedFolder = Annotated[Path, typer.Argument(help="A folder that corp prune or corp.save wrote.")]


@dataclass(frozen=True)
class TextOptions:
    """How texts become sequences of tokens."""

    field: Annotated[
        str, option("Key, column or column number (from 1) of the text in a record.", DATA, "--text-field")
    ] = "text"
    seq_len: Annotated[
        int | None, option("Tokens per sequence.", DATA, min=2, show_default="2048, or the model's context if shorter")
    ] = None
    pack: Annotated[
        bool | None,
        option(
            "Pack several documents into a sequence, or use one sequence per document.",
            DATA,
            "--pack/--no-pack",
            show_default="pack for causal models",
        ),
    ] = None
    tokenizer: Annotated[str | None, option("Folder of the tokenizer, if it is not with the model.", DATA)] = None
    chat: Annotated[
        bool, option("Treat records as conversations and apply the tokenizer's chat template.", DATA, "--chat")
    ] = False


@dataclass(frozen=True)
class Source:
    """Where the model and its calibration data come from, and where the model runs."""

    model: Model
    weights: Weights = None
    calib: Annotated[
        list[Path],
        option(
            "Calibration data: a folder of unlabelled images, or a file or folder of texts "
            "(.txt, .jsonl, .csv, .tsv, .parquet, a datasets folder). May be repeated.",
            DATA,
        ),
    ] = field(default_factory=list)
    samples: Annotated[
        int | None,
        option(
            "Number of images or sequences, drawn by --seed.",
            DATA,
            min=1,
            show_default="4000 images or documents, 128 packed sequences, or more for wide MLPs",
        ),
    ] = None
    batch_size: BatchSize = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    seed: Annotated[int, option("Seed that draws the calibration samples.", DATA)] = 0
    max_bad: MaxBad = 0.05
    text: TextOptions = field(default_factory=TextOptions)
    own_texts: Annotated[
        int | None,
        option(
            "Sequences that a causal language model writes itself, added to --calib; 0: none.",
            DATA,
            "--own-texts",
            min=0,
            show_default="0; if texts are few, prune, plan, calibrate and sweep take up to twice the given number",
        ),
    ] = None
    images: int = IMAGES  # the default of --samples for images; not an option itself


@dataclass(frozen=True)
class Collection:
    """How much of the data the statistics use, and how much memory they may take."""

    sample_tokens: Annotated[
        str,
        option(
            "Tokens per sample for the MLP statistics: auto (enough for a stable fit), all, or a number.",
            DATA,
            "--sample-tokens",
        ),
    ] = "auto"
    memory: Annotated[
        str | None,
        option(
            "Memory limit for the statistics, such as 4GB; corp makes several passes if needed.",
            MACHINE,
            show_default="all",
        ),
    ] = None

    def settings(self, **more: Any) -> Settings:
        """The settings of the data pass; `more` are other fields of `corp.Settings`."""
        from corp.calibration.memory import parse_bytes
        from corp.calibration.settings import Settings

        tokens: Any = self.sample_tokens
        tokens = tokens if tokens in ("auto", "all") else parse_number(tokens, int, "--sample-tokens")
        return Settings(tokens, None if self.memory is None else parse_bytes(self.memory), **more)


@dataclass(frozen=True)
class Deployment:
    """A second sample, of what the model will see, with which a plan is compared."""

    deploy_data: Annotated[
        list[Path],
        option("Unlabelled data like that in use: report how every site's statistics differ from --calib.", DATA),
    ] = field(default_factory=list)
    mix_deploy: Annotated[
        bool,
        option(
            "Calibrate on --calib and --deploy-data together, and report the remaining difference.",
            DATA,
            "--mix-deploy",
        ),
    ] = False
