"""Calibration texts: the sequences of --calib, and if those are few, others that the model writes itself."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from corp.adapters.registry import find_sites
from corp.calibration.settings import ENOUGH_PER_CHANNEL
from corp.cli import models
from corp.cli.arguments import Source
from corp.cli.console import note, progress
from corp.data import text, written
from corp.errors import DataError
from corp.recipe import Recipe
from corp.steps.allocation import search

DOCUMENTS = 4000  # unless --samples is given
LOGITS = 1 << 27  # per batch of a language model: half a gigabyte in float32
OWN_PER_GIVEN = 2  # own texts per given one, unless --own-texts asks for more; docs/language.md has what they gain


def channels_to_fit(model: nn.Module, recipe: Recipe | None = None) -> int:
    """Channels of the widest MLP that the recipe prunes (None: any), if the model is a causal language model; else 0.

    A fit of so many channels decides how many tokens are enough.
    """
    if models.kind_of(model) != models.CAUSAL:
        return 0
    with progress("finding what can be pruned", None, ""):
        sites = find_sites(model)
    pruned = [
        site
        for site in sites.mlp
        if recipe is None
        or (not recipe.skips(site.name) and (recipe.has_target or recipe.sparsity(site.kind, site.name) > 0))
    ]
    return max((site.width for site in pruned), default=0)


def calibration_texts(model: nn.Module, source: Source, channels: int = 0, *, dry: bool = False) -> text.TextBatches:
    """Sequences of the texts, drawn by seed: packed, or one document each; and the model's own.

    `channels` (of the widest MLP) are to be fitted, so there should be enough tokens for those. In a dry run nothing
    is written: repeated sequences take the place of own ones.
    """
    pack = models.kind_of(model) == models.CAUSAL if source.text.pack is None else source.text.pack
    tokenizer = models.tokenizer_of(source.model, source.text.tokenizer)
    length = sequence_length(model, tokenizer, source.text.seq_len)
    enough = max(text.SAMPLES, math.ceil(ENOUGH_PER_CHANNEL * channels / length)) if pack else DOCUMENTS
    make = text.packed if pack else text.one_per_document
    with progress("reading texts", None, ""):
        batches = make(
            source.calib,
            tokenizer,
            length=length,
            samples=source.samples or enough,
            seed=source.seed,
            field=source.text.field,
            chat=source.text.chat,
            batch_size=source.batch_size or (sequences_per_batch(tokenizer, length) if pack else None),
        )
    if batches.samples < (source.samples or text.SAMPLES) and (pack or source.samples):
        wanted = source.samples or text.SAMPLES
        note(f"the text is enough for {batches.samples} sequences ({batches.tokens} tokens), not for {wanted}")
    own = source.own_texts
    if channels and batches.tokens < search.TOKENS_PER_CHANNEL * channels:
        own = _for_few(model, source, batches, channels)
    if not own:
        return batches
    if dry and written.can_write(model, batches):
        note(f"the estimate leaves out the writing of {own} texts: about twice a forward pass over them")
        return written.stand_ins(batches, own)
    with progress("writing texts", own, "sequences") as advance:
        return written.with_own_texts(model, batches, own, seed=source.seed, advance=advance)


def _for_few(model: nn.Module, source: Source, batches: text.TextBatches, channels: int) -> int:
    """How many texts the model writes if those given are few, which is announced; --own-texts decides if given."""
    few = (
        f"{batches.tokens} tokens are {batches.tokens / channels:.0f} per MLP channel; with fewer than "
        f"{search.TOKENS_PER_CHANNEL}, a fit follows these texts"
    )
    if not written.can_write(model, batches):
        note(f"{few}. Give more")
        return source.own_texts or 0
    lacking = math.ceil((ENOUGH_PER_CHANNEL * channels - batches.tokens) * batches.samples / batches.tokens)
    if source.own_texts is not None:
        if source.own_texts < lacking:
            note(f"{few}. Give more, or let the model write some: --own-texts {lacking}")
        return source.own_texts
    own = min(lacking, OWN_PER_GIVEN * batches.samples)
    more = f"; if you can, give more texts, or --own-texts {lacking}" if own < lacking else ""
    note(f"{few}, so the model writes {own} itself (--own-texts 0 turns that off){more}")
    return own


def sequences_per_batch(tokenizer: Any, length: int) -> int:
    """How many sequences fit in a batch, given limits on its tokens and on its logits."""
    return max(1, min(text.TOKENS_PER_BATCH, LOGITS // max(1, len(tokenizer))) // length)


def sequence_length(model: nn.Module, tokenizer: Any, wanted: int | None) -> int:
    """The requested length, otherwise the paper's 2048; at most the model's context."""
    from corp.adapters import hf_models

    context = hf_models.context_length(model, tokenizer)
    if wanted is not None and context is not None and wanted > context:
        raise DataError(f"--seq-len {wanted} is more than the model's context of {context} tokens")
    return wanted or min(text.LENGTH, context or text.LENGTH)
