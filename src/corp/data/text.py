"""Batches of token ids from texts: packed into sequences of one length, or one document per sequence.

Texts are tokenised in a random order given by the seed, and only until there are enough sequences. These take
four bytes per token.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corp.data.chat import template_of
from corp.data.documents import drawn, in_order, open_documents
from corp.errors import DataError

LENGTH, SAMPLES = 2048, 128  # the paper's, if the model's context allows it
TOKENS_PER_BATCH = 8192
IGNORED = -100  # a target that is not scored
# A plain text is read in pieces: small ones for random drawing, large ones for the whole text, as cuts cost tokens.
DRAWN_PIECE, WHOLE_PIECE = 1 << 16, 1 << 22

Tokenizer: TypeAlias = Any  # of transformers, or anything with the same interface
Batch: TypeAlias = dict[str, Tensor]


class Span(NamedTuple):
    """One sequence: tokens start to end of the ids; those from `scored` on are scored."""

    start: int
    end: int
    scored: int


@dataclass(eq=False)
class TextBatches(Iterable[Batch]):
    """Batches {"input_ids", "attention_mask"} of (B, T) token ids, padded on the right if lengths differ."""

    ids: Tensor  # (tokens,) int32
    spans: Sequence[Span]
    pad: int
    batch_size: int
    description: str

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size={self.batch_size}: must be at least 1")

    @property
    def samples(self) -> int:
        return len(self.spans)

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences, without padding."""
        return sum(span.end - span.start for span in self.spans)

    def fingerprint(self) -> str:
        """A hash of the token ids of all sequences: equal for equal text, tokenizer, seed and length."""
        digest = hashlib.blake2b(digest_size=16)
        for span in self.spans:
            digest.update(f"{span.end - span.start}:".encode())
            digest.update(self.ids[span.start : span.end].numpy().tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        return self.description

    def parts(self, sizes: Sequence[int], seed: int) -> list[TextBatches]:
        """Disjoint parts in an order drawn by `seed`; the first k together are sizes[k - 1] of these sequences."""
        order = random.Random(seed).sample(self.spans, len(self.spans))
        return [replace(self, spans=order[a:b]) for a, b in pairwise((0, *sizes))]

    def __len__(self) -> int:
        return -(-len(self.spans) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return (batch for _, _, batch in self.indexed(lambda _: True))

    def indexed(self, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int, Batch]]:
        """(index, index of its first sequence, batch) of the wanted batches."""
        for index in filter(wanted, range(len(self))):
            start = index * self.batch_size
            yield index, start, self._batch(self.spans[start : start + self.batch_size])

    def scored(self) -> Iterator[tuple[Batch, Tensor]]:
        """Batches with their targets (B, T): the next token of every position, IGNORED if it is not scored."""
        for _, start, batch in self.indexed(lambda _: True):
            targets = torch.full_like(batch["input_ids"], IGNORED)
            for row, span in enumerate(self.spans[start : start + self.batch_size]):
                first = max(span.scored, span.start + 1)  # the first token cannot be predicted
                targets[row, first - 1 - span.start : span.end - 1 - span.start] = self.ids[first : span.end]
            yield batch, targets

    def masked(self) -> Iterator[tuple[Batch, Tensor]]:
        """Batches with their attention masks, for metrics that pool over real tokens."""
        return ((batch, batch["attention_mask"]) for batch in self)

    def _batch(self, spans: Sequence[Span]) -> Batch:
        rows = [self.ids[span.start : span.end].long() for span in spans]
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return {"input_ids": pad_sequence(rows, batch_first=True, padding_value=self.pad), "attention_mask": mask}


def packed(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    length: int,
    samples: int,
    seed: int,
    field: str = "text",
    batch_size: int | None = None,
    chat: bool = False,
) -> TextBatches:
    """`samples` sequences of `length` tokens from documents drawn by `seed` and joined with EOS.

    Fewer if the text ends earlier; if it does not fill one sequence, a single shorter one. With `chat`, records are
    conversations, made into texts by the tokenizer's chat template, which adds all special tokens.
    """
    _check(length=length, samples=samples)
    template = template_of(tokenizer) if chat else None
    sources = open_documents(paths, field=field, lines=False, piece=DRAWN_PIECE, template=template)
    ids = array("i")
    for tokens in _joined(((text, not chat) for text in drawn(sources, seed)), tokenizer):
        ids.extend(tokens)
        if len(ids) >= samples * length:
            break
    spans = _windows(len(ids), length, length)[:samples]
    return _batches(ids, spans, tokenizer, f"packed into {len(spans)} x {length} tokens", length, batch_size)


def one_per_document(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    length: int,
    samples: int | None,
    seed: int,
    field: str = "text",
    batch_size: int | None = None,
    bos: bool = False,
    chat: bool = False,
) -> TextBatches:
    """One document per sequence, cut at `length` tokens: `samples` of them drawn by `seed`, or all in their order.

    A plain text without separators has a document per line. With `bos`, sequences begin with BOS even if the
    tokenizer does not add it. `chat` is as for packed.
    """
    _check(length=length, samples=samples)
    template = template_of(tokenizer) if chat else None
    sources = open_documents(paths, field=field, lines=True, piece=WHOLE_PIECE, template=template)
    texts = (text for text, _ in in_order(sources)) if samples is None else drawn(sources, seed)
    return of_texts(texts, tokenizer, length=length, samples=samples, batch_size=batch_size, bos=bos, special=not chat)


def of_texts(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    *,
    length: int,
    samples: int | None = None,
    batch_size: int | None = None,
    bos: bool = False,
    special: bool = True,
) -> TextBatches:
    """One sequence per text; texts of only white space are left out.

    Without `special`, the tokenizer adds no special tokens, because a chat template has put them into the text.
    """
    ids, spans = array("i"), list[Span]()
    first = tokenizer.bos_token_id if bos else None
    for text in texts:
        if not text.strip():
            continue
        tokens = _encode(tokenizer, text, special=special, length=length)
        if first is not None and tokens[:1] != [first]:
            tokens = [first, *tokens[: length - 1]]
        spans.append(Span(len(ids), len(ids) + len(tokens), len(ids) + 1))
        ids.extend(tokens)
        if len(spans) == samples:
            break
    longest = max((span.end - span.start for span in spans), default=0)
    what = f"one document per sequence, {len(spans)} of at most {length} tokens"
    return _batches(ids, spans, tokenizer, what, longest, batch_size)


def windows(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    length: int,
    stride: int | None = None,
    field: str = "text",
    batch_size: int | None = None,
) -> TextBatches:
    """The whole text in its order, in windows of `length` tokens that begin every `stride` (None: no overlap).

    In a window that overlaps the one before, only tokens that were not scored there are scored. An incomplete last
    window is left out if windows do not overlap, as usual for WikiText-2, unless it is the only one.
    """
    step = length if stride is None else stride
    _check(length=length, stride=step)
    if step > length:
        raise DataError(f"a stride of {step} leaves out text between windows of {length} tokens; use at most {length}")
    sources = open_documents(paths, field=field, lines=False, piece=WHOLE_PIECE)
    ids = array("i")
    for tokens in _joined(in_order(sources), tokenizer):
        ids.extend(tokens)
    what = f"windows of {length} tokens every {step}"
    return _batches(ids, _windows(len(ids), length, step), tokenizer, what, length, batch_size)


def _windows(count: int, length: int, step: int) -> list[Span]:
    spans: list[Span] = []
    judged = 0
    for start in range(0, count, step):
        end = min(start + length, count)
        if end < start + length and spans and step == length:
            break
        spans.append(Span(start, end, max(judged, start + 1)))
        judged = end
        if end == count:
            break
    return spans


def _joined(texts: Iterator[tuple[str, bool]], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids text by text, with EOS between documents and the tokenizer's special tokens."""
    eos, first = tokenizer.eos_token_id, True
    for text, begins in texts:
        if not text.strip():
            continue
        tokens = _encode(tokenizer, text, special=begins)
        # If one token both begins and ends documents (OPT's), it is added once.
        if begins and not first and eos is not None and tokens[:1] != [eos]:
            yield [eos]
        first = False
        yield tokens


def _encode(tokenizer: Tokenizer, text: str, *, special: bool = True, length: int | None = None) -> list[int]:
    cut = {"truncation": True, "max_length": length} if length else {}
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False, **cut)["input_ids"]
    return ids


def _batches(
    ids: array[int], spans: Sequence[Span], tokenizer: Tokenizer, what: str, length: int, batch_size: int | None
) -> TextBatches:
    if not spans:
        raise DataError("the texts are empty (only white space); to read another field give field=NAME")
    fallbacks = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # masked tokens have no effect
    pad = next(token for token in fallbacks if token is not None)
    size = batch_size or max(1, TOKENS_PER_BATCH // max(1, length))
    description = f"{what}; {type(tokenizer).__name__} of {len(tokenizer)} tokens"
    return TextBatches(torch.frombuffer(ids or array("i", [pad]), dtype=torch.int32), spans, pad, size, description)


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        least = 2 if name == "length" else 1  # a single token has no next one
        if number is not None and number < least:
            raise DataError(f"{name}={number}: must be at least {least}")
