"""Texts that a language model writes itself, as additional calibration data if texts are scarce.

A fit of some thousand channels on a few dozen texts overfits those texts. The model's own texts are a sample of what it
has learnt, of any length and without labels, and improve the fit on other texts (docs/language.md).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from corp.calibration.batches import evaluating, placement
from corp.data.text import Span, TextBatches
from corp.errors import DataError, ModelError
from corp.io.observer import Advance

PROMPT = 8  # tokens of a given text that the model continues
TOGETHER = 65_536  # tokens written at a time, whose keys and values are all in memory


def with_own_texts(
    model: nn.Module, batches: TextBatches, count: int, *, seed: int = 0, advance: Advance = lambda _done: None
) -> TextBatches:
    """The given sequences and `count` more that the model writes, evenly mixed, so that held-out batches have both."""
    given = [batches.ids[span.start : span.end] for span in batches.spans if span.end - span.start > PROMPT]
    if not given:
        raise DataError(f"own texts continue {PROMPT} tokens of a given text, but no given text is longer than that")
    length = max(map(len, given))
    own = own_texts(model, given, count, length=length, seed=seed, advance=advance)
    start = len(batches.ids)
    written = [Span(at, at + length, at + 1) for at in range(start, start + own.numel(), length)]
    return replace(
        batches,
        ids=torch.cat([batches.ids, own.flatten().to(batches.ids)]),
        spans=_mixed(batches.spans, written),
        description=f"{batches.description}; {count} of {length} tokens written by the model, seed {seed}",
    )


def can_write(model: nn.Module, batches: TextBatches) -> bool:
    """Whether the model generates text, and some given text is long enough to be continued."""
    return _generates(model) and any(span.end - span.start > PROMPT for span in batches.spans)


def stand_ins(batches: TextBatches, count: int) -> TextBatches:
    """As many sequences as with `count` own texts, for an estimate: given ones are repeated instead."""
    longest = max(batches.spans, key=lambda span: span.end - span.start)
    return replace(batches, spans=_mixed(batches.spans, [longest] * count))


def _generates(model: nn.Module) -> bool:
    can_generate: Any = getattr(model, "can_generate", lambda: False)
    return bool(can_generate())


def own_texts(
    model: nn.Module,
    given: Sequence[Tensor],
    count: int,
    *,
    length: int,
    seed: int = 0,
    advance: Advance = lambda _done: None,
) -> Tensor:
    """Token ids (count, length), drawn from the model's own distribution after a few tokens of the given texts (n,).

    The same seed gives the same texts on the same machine; torch's own generator is not changed.
    """
    if not _generates(model):
        raise ModelError(f"{type(model).__name__} does not generate text, so it cannot write calibration texts")
    draw, device = random.Random(seed), placement(model)[0]
    prompts = torch.stack([_prompt(draw.choice(given), draw) for _ in range(count)])  # (count, PROMPT)
    parts = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), evaluating(model):
        torch.manual_seed(seed)
        for some in prompts.split(max(1, TOGETHER // length)):
            parts.append(_continued(model, some.to(device), length).cpu())
            advance(len(some))
    return torch.cat(parts)


def _prompt(text: Tensor, draw: random.Random) -> Tensor:
    start = draw.randrange(len(text) - PROMPT)
    return text[start : start + PROMPT].long()


def _continued(model: Any, prompts: Tensor, length: int) -> Tensor:
    """The prompts (B, PROMPT), continued up to the length by tokens drawn from the full predicted distribution."""
    from transformers import GenerationConfig

    plain = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, min_length=length, max_length=length, use_cache=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    with torch.no_grad():
        ids: Tensor = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=plain)
    return ids


def _mixed(first: Sequence[Span], second: Sequence[Span]) -> list[Span]:
    """Both, evenly mixed, so that every part of the whole contains its share of each."""
    places = [(i / len(spans), span) for spans in (first, second) for i, span in enumerate(spans)]
    return [span for _, span in sorted(places, key=lambda place: place[0])]
