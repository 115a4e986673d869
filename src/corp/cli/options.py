"""The options and functions of the command line under the names that analyze, sweep, eval, bench, report and demo use.

New code takes the dataclasses of `corp.cli.arguments` and the functions of `corp.cli.inputs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from corp.calibration.job import Settings
from corp.cli.arguments import DATA, Collection, option
from corp.cli.arguments import BatchSize as MaybeBatchSize
from corp.cli.arguments import Device as Device
from corp.cli.arguments import Dtype as Dtype
from corp.cli.arguments import Json as Json
from corp.cli.arguments import MaxBad as MaxBad
from corp.cli.arguments import Memory as Memory
from corp.cli.arguments import Model as ModelArg
from corp.cli.arguments import Overwrite as Overwrite
from corp.cli.arguments import Pack as Pack
from corp.cli.arguments import Samples as MaybeSamples
from corp.cli.arguments import SampleTokens as Tokens
from corp.cli.arguments import Seed as Seed
from corp.cli.arguments import SeqLen as SeqLen
from corp.cli.arguments import Source as Source
from corp.cli.arguments import Stats as Stats
from corp.cli.arguments import TextField as TextField
from corp.cli.arguments import TextOptions as TextOptions
from corp.cli.arguments import Tokenizer as Tokenizer
from corp.cli.arguments import Weights as Weights
from corp.cli.inputs import calibrated as calibrated
from corp.cli.models import chosen_device as chosen_device
from corp.cli.models import load_model as load_model
from corp.cli.models import place as place
from corp.cli.sources import image_batches as image_batches

__all__ = [
    "Device", "Dtype", "Json", "MaxBad", "MaybeBatchSize", "MaybeCalib", "MaybeSamples", "Memory", "ModelArg",
    "Overwrite", "Pack", "Seed", "SeqLen", "Source", "Stats", "TextField", "TextOptions", "Tokenizer", "Tokens",
    "Weights", "calibrated", "chosen_device", "image_batches", "load_model", "make_settings", "place",
]  # fmt: skip

MaybeCalib = Annotated[
    list[Path] | None,
    option("Calibration data: a folder of unlabelled images, or a file or folder of texts.", DATA, show_default=False),
]


def make_settings(tokens: str, memory: str | None) -> Settings:
    return Collection(tokens, memory).settings()
