"""The data of a command line as batches that the model takes: images or texts, whichever its kind."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from corp.cli import models
from corp.cli.arguments import Source
from corp.cli.console import note
from corp.errors import DataError, warn

if TYPE_CHECKING:
    from corp.data.images import ImageBatches
    from corp.data.text import TextBatches

DOCUMENTS = 4000  # unless --samples is given
IMAGE_BATCH = 32
FEW_IMAGES = 64  # below this, a fit of some hundred channels follows the sample
LABELS = 32  # a photograph has more colours
LABEL_FILES = frozenset({".txt", ".xml", ".json", ".csv", ".tsv", ".mat", ".npy", ".yaml", ".yml"})
LOGITS = 1 << 27  # per batch of a language model: half a gigabyte in float32


def calibration_batches(model: nn.Module, source: Source) -> ImageBatches | TextBatches:
    """The data of --calib, drawn by the seed, as batches that the model takes."""
    kind = models.kind_of(model)
    if kind == models.IMAGE:
        from corp.data.images import ImageBatches, choose, list_images

        refuse_labels(source.calib)
        chosen = choose(list_images(source.calib), source.samples or source.images, source.seed)
        transform, size = models.preprocessing_of(source.model, model), source.batch_size or IMAGE_BATCH
        warn_of_odd_images(chosen)
        return ImageBatches(chosen, transform, batch_size=size, max_bad=source.max_bad)
    refuse_other(kind, model)
    return text_batches(model, source, pack=kind == models.CAUSAL if source.text.pack is None else source.text.pack)


def refuse_other(kind: str, model: nn.Module) -> None:
    if kind == models.OTHER:
        raise DataError(
            f"{type(model).__name__} takes neither images alone nor texts alone, so a folder cannot feed it; "
            "calibrate it from Python, with batches of your own: corp.calibrate(model, batches)"
        )


def refuse_labels(folders: list[Path]) -> None:
    """Refuse a folder that holds labels, not images, and name one beside it that has images."""
    from corp.data.images import SUFFIXES

    for folder in folders:
        suffixes = Counter(path.suffix.lower() for path in folder.rglob("*") if path.is_file())
        if not suffixes or SUFFIXES & suffixes.keys() or not suffixes.keys() <= LABEL_FILES:
            continue
        beside = (entry for entry in sorted(folder.absolute().parent.iterdir()) if entry.is_dir())
        images = next((e for e in beside if any(file.suffix.lower() in SUFFIXES for file in e.iterdir())), None)
        remedy = f"--calib {images}" if images else "--calib with the folder of the images themselves"
        what = ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(3))
        raise DataError(f"{folder} holds labels ({what} files) and no images; try {remedy}")


def warn_of_odd_images(paths: list[Path]) -> None:
    """Warn if there are too few images for a stable fit, or if they look like label maps instead of photographs."""
    from corp.data.images import open_image

    if len(paths) < FEW_IMAGES:
        warn(f"{len(paths)} images are too few for a fit that holds on more; give at least {FEW_IMAGES} with --calib")
    with suppress(OSError, ValueError, DataError):  # unreadable images are dealt with where they are read
        colours = [open_image(path).resize((64, 64), 0).getcolors(LABELS) for path in paths[:4]]
        if all(found is not None for found in colours):
            warn(
                f"the images in {paths[0].parent} have at most {LABELS} colours each, as label maps do; "
                "--calib takes the photographs themselves"
            )


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
        chat=source.text.chat,
        batch_size=source.batch_size or (sequences_per_batch(tokenizer, length) if pack else None),
    )
    if batches.samples < wanted and (pack or source.samples):
        note(f"there is text for {batches.samples} sequences ({batches.tokens} tokens), not for {wanted}")
    return batches


def sequences_per_batch(tokenizer: Any, length: int) -> int:
    """How many sequences keep both the tokens of a batch and its logits, one per word of the vocabulary, in bounds."""
    from corp.data import text

    return max(1, min(text.TOKENS_PER_BATCH, LOGITS // max(1, len(tokenizer))) // length)


def sequence_length(model: nn.Module, tokenizer: Any, wanted: int | None) -> int:
    """The length that was asked for, otherwise the paper's 2048; never more than the model's context."""
    from corp.adapters import hf_models
    from corp.data import text

    context = hf_models.context_length(model, tokenizer)
    if wanted is not None and context is not None and wanted > context:
        raise DataError(f"--seq-len {wanted} is more than the model's context of {context} tokens")
    return wanted or min(text.LENGTH, context or text.LENGTH)
