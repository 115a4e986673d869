"""The data of a command line as batches that the model takes: images or texts, whichever its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from corp.cli import models
from corp.cli.console import note
from corp.errors import DataError

if TYPE_CHECKING:
    from corp.data.images import ImageBatches
    from corp.data.text import TextBatches

IMAGES, DOCUMENTS = 4000, 4000  # where nobody says how many
IMAGE_BATCH = 32
LOGITS = 1 << 27  # per batch of a language model: half a gigabyte in float32


@dataclass(frozen=True)
class TextOptions:
    """How texts become sequences."""

    field: str = "text"
    seq_len: int | None = None
    pack: bool | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class Source:
    """Where the model and its calibration data come from."""

    model: str
    weights: Path | None
    calib: list[Path]
    samples: int | None
    batch_size: int | None
    device: str
    dtype: str
    seed: int
    max_bad: float
    text: TextOptions = TextOptions()
    images: int = IMAGES  # samples where nobody says how many, of images


def calibration_batches(model: nn.Module, source: Source) -> ImageBatches | TextBatches:
    """The data of --calib, drawn by seed, as the model wants it."""
    kind = models.kind_of(model)
    if kind == models.IMAGE:
        samples, size = source.samples or source.images, source.batch_size or IMAGE_BATCH
        return image_batches(model, source.calib, samples, source.seed, size, source.max_bad, name=source.model)
    refuse_other(kind, model)
    return text_batches(model, source, pack=kind == models.CAUSAL if source.text.pack is None else source.text.pack)


def refuse_other(kind: str, model: nn.Module) -> None:
    if kind == models.OTHER:
        raise DataError(
            f"{type(model).__name__} takes neither images alone nor texts alone, so a folder cannot feed it; "
            "calibrate it from Python, with batches of your own: corp.calibrate(model, batches)"
        )


def image_batches(
    model: nn.Module,
    folders: list[Path],
    samples: int,
    seed: int,
    batch_size: int,
    max_bad: float = 0.05,
    *,
    name: str = "",
) -> ImageBatches:
    """The images of the folders, drawn by seed, preprocessed as the model wants them."""
    from corp.data.images import ImageBatches, choose, list_images

    chosen = choose(list_images(folders), samples, seed)
    return ImageBatches(chosen, models.preprocessing_of(name, model), batch_size=batch_size, max_bad=max_bad)


def text_batches(model: nn.Module, source: Source, *, pack: bool) -> TextBatches:
    """Sequences of the texts, drawn by seed: packed, or one document each."""
    from corp.data import text

    tokenizer = models.tokenizer_of(source.model, source.text.tokenizer)
    length = sequence_length(model, tokenizer, source.text.seq_len)
    wanted = source.samples or (text.SAMPLES if pack else DOCUMENTS)
    make = text.packed if pack else text.one_per_document
    batches = make(
        source.calib,
        tokenizer,
        length=length,
        samples=wanted,
        seed=source.seed,
        field=source.text.field,
        batch_size=source.batch_size or (sequences_per_batch(tokenizer, length) if pack else None),
    )
    if batches.samples < wanted and (pack or source.samples):
        note(f"there is text for {batches.samples} sequences ({batches.tokens} tokens), not for {wanted}")
    return batches


def sequences_per_batch(tokenizer: Any, length: int) -> int:
    """As many as keep both the tokens of a batch and its logits, one per word of the vocabulary, within bounds."""
    from corp.data import text

    return max(1, min(text.TOKENS_PER_BATCH, LOGITS // max(1, len(tokenizer))) // length)


def sequence_length(model: nn.Module, tokenizer: Any, wanted: int | None) -> int:
    """What was asked for, else the paper's 2048; never more than the model's context."""
    from corp.adapters import hf_models
    from corp.data import text

    context = hf_models.context_length(model, tokenizer)
    if wanted is not None and context is not None and wanted > context:
        raise DataError(f"--seq-len {wanted} is more than the model's context of {context} tokens")
    return wanted or min(text.LENGTH, context or text.LENGTH)
