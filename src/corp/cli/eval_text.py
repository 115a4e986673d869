"""corp eval on texts: perplexity of language models, sentence embeddings of encoders, tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from corp.calibration.batches import placement, without_cache
from corp.cli import models as m
from corp.cli.arguments import TextOptions
from corp.cli.console import note, progress, show_table
from corp.cli.eval_images import percent, plus_minus
from corp.cli.sources import sequence_length, sequences_per_batch
from corp.errors import DataError
from corp.evaluate.language import NextTokens
from corp.evaluate.run import Contender, side_by_side
from corp.evaluate.sentences import Embeddings, sts_spearman
from corp.evaluate.tasks import require, run_tasks
from corp.measure.cost import count_params
from corp.measure.intervals import Interval

if TYPE_CHECKING:
    from corp.data.text import TextBatches

COLUMNS = {
    m.CAUSAL: ("model", "params", "perplexity", "/ dense", "agreement %", "KL from dense"),
    m.ENCODER: ("model", "params", "cosine to dense", "STS Spearman"),
}
NUMBERS = {
    m.CAUSAL: ("perplexity", "perplexity_ratio", "agreement", "kl"),
    m.ENCODER: ("cosine", "spearman"),
}


@dataclass(frozen=True)
class Options:
    """What of the texts is measured, and how."""

    data: list[Path]
    samples: int | None = None
    batch_size: int | None = None
    seed: int = 0
    text: TextOptions = field(default_factory=TextOptions)
    stride: int | None = None
    per_document: bool = False
    sts: Path | None = None
    tasks: tuple[str, ...] = ()
    limit: int | None = None


@dataclass
class Row:
    """A model, under the name it was given, and what was measured of it."""

    name: str
    params: int
    kind: str
    numbers: dict[str, Interval | None] = field(default_factory=dict)
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: found and found.to_dict() for name, found in self.numbers.items()}
        return {"model": self.name, "params": self.params, **numbers, "tasks": self.tasks or None}


def evaluate_texts(loaded: dict[str, nn.Module], options: Options) -> tuple[dict[str, Any], list[Row]]:
    """What --json prints, and the rows of the table; the first model is the one to compare with."""
    kind, first = m.kind_of(next(iter(loaded.values()))), next(iter(loaded))
    _check(kind, options, alone=len(loaded) == 1)
    if options.tasks:
        require()
    tokenizer = m.tokenizer_of(first, options.text.tokenizer)
    rows = [Row(name, count_params(model), kind, dict.fromkeys(NUMBERS[kind])) for name, model in loaded.items()]
    content: dict[str, Any] = {
        "kind": kind,
        "seed": options.seed,
        "dense": first if len(loaded) > 1 else None,
        "data": None,
    }
    if options.data:
        batches = text_batches(next(iter(loaded.values())), tokenizer, kind, options)
        files = [str(path) for path in options.data]
        counts = {"sequences": batches.samples, "tokens": batches.tokens}
        content["data"] = {"files": files, **counts, "sequences_are": batches.describe()}
        _measure(kind, loaded, rows, batches)
    if options.sts is not None:
        content["sts"] = {"file": str(options.sts), "pairs": _measure_sts(loaded, rows, tokenizer, options)}
    for row, model in zip(rows, loaded.values(), strict=True):
        if options.tasks:
            size = options.batch_size or 8
            row.tasks = run_tasks(model, tokenizer, options.tasks, batch_size=size, limit=options.limit)
    content["models"] = [row.to_dict() for row in rows]
    return content, rows


def _check(kind: str, options: Options, *, alone: bool) -> None:
    if kind == m.CAUSAL and options.sts is not None:
        raise DataError("--sts is for encoders of sentences; a causal language model has --data and --tasks")
    if kind == m.ENCODER and options.tasks:
        raise DataError("--tasks are for causal language models; an encoder has --data and --sts")
    if kind == m.ENCODER and (options.stride is not None or options.per_document):
        raise DataError("--stride and --per-document are ways of taking a perplexity, which an encoder has not")
    if options.stride is not None and options.per_document:
        raise DataError("--stride is for windows over the whole text; it cannot go with --per-document")
    if not (options.data or options.sts or options.tasks):
        raise DataError("nothing to measure on: give --data TEXTS" + (" or --sts FILE" if kind == m.ENCODER else ""))
    if kind == m.ENCODER and alone and options.sts is None:
        raise DataError("nothing to measure: one encoder has no other to be compared with; give --dense, or --sts FILE")


def text_batches(model: nn.Module, tokenizer: Any, kind: str, options: Options) -> TextBatches:
    from corp.data import text

    length = sequence_length(model, tokenizer, options.text.seq_len)
    size = options.batch_size or (sequences_per_batch(tokenizer, length) if kind == m.CAUSAL else None)
    chosen: dict[str, Any] = {"length": length, "field": options.text.field, "batch_size": size}
    if kind == m.ENCODER or options.per_document:
        drawn: dict[str, Any] = {"samples": options.samples, "seed": options.seed, "bos": kind == m.CAUSAL}
        return text.one_per_document(options.data, tokenizer, **chosen, **drawn)
    if options.samples is not None:
        if options.stride is not None:
            raise DataError("--samples draws documents and packs them; --stride goes over the whole text: give one")
        return text.packed(options.data, tokenizer, **chosen, samples=options.samples, seed=options.seed)
    batches = text.windows(options.data, tokenizer, **chosen, stride=options.stride)
    left = len(batches.ids) - batches.spans[-1].end
    if left:
        note(f"the last {left} of {len(batches.ids)} tokens fill no window of {length} and are left out")
    return batches


def _measure(kind: str, loaded: dict[str, nn.Module], rows: Sequence[Row], batches: TextBatches) -> None:
    judged = [*(perplexities if kind == m.CAUSAL else likenesses)(loaded, batches)]
    for number, (row, metric) in enumerate(zip(rows, judged, strict=True)):
        alone = ("perplexity",) if number == 0 else NUMBERS[kind]  # that a model is like itself is no news
        row.numbers |= {name: value for name, value in metric.intervals().items() if name in alone}


def perplexities(loaded: dict[str, nn.Module], batches: TextBatches) -> list[NextTokens]:
    """Every model against the first, in one pass over the texts."""
    metrics = [NextTokens() for _ in loaded]
    models = list(loaded.values())
    with progress(f"evaluating on {placement(models[0])[0]}", batches.samples, "sequences") as advance:
        contenders = [Contender(model, metric) for model, metric in zip(models, metrics, strict=True)]
        with without_cache(*models):
            side_by_side(models[0] if len(models) > 1 else None, contenders, batches.scored(), advance)
    return metrics


def likenesses(loaded: dict[str, nn.Module], batches: TextBatches, *, keep: bool = False) -> list[Embeddings]:
    """Every encoder against the first, in one pass over the texts."""
    metrics = [Embeddings(keep) for _ in loaded]
    models = list(loaded.values())
    # Models with a head of their own give hidden states only when asked.
    asking = (({**batch, "output_hidden_states": True}, mask) for batch, mask in batches.masked())
    with progress(f"evaluating on {placement(models[0])[0]}", batches.samples, "sentences") as advance:
        contenders = [Contender(model, metric) for model, metric in zip(models, metrics, strict=True)]
        side_by_side(models[0] if len(models) > 1 else None, contenders, asking, advance)
    return metrics


def _measure_sts(loaded: dict[str, nn.Module], rows: Sequence[Row], tokenizer: Any, options: Options) -> int:
    from corp.data import sts, text

    assert options.sts is not None
    pairs = sts.read_pairs(options.sts)
    length = sequence_length(next(iter(loaded.values())), tokenizer, options.text.seq_len)
    batches = text.of_texts(pairs.sentences, tokenizer, length=length, batch_size=options.batch_size or 64)
    metrics = likenesses(loaded, batches, keep=True)
    for number, (row, metric) in enumerate(zip(rows, metrics, strict=True)):
        row.numbers["spearman"] = sts_spearman(torch.cat(metric.kept), pairs.scores)
        if number and not options.data:  # the sentences of the pairs do for the comparison too
            row.numbers |= metric.intervals()
    return len(pairs.scores)


def show_texts(content: dict[str, Any], rows: Sequence[Row]) -> None:
    kind = content["kind"]
    about = []
    if content["data"]:
        about.append(f"{content['data']['tokens']} tokens ({content['data']['sequences_are']})")
    if content.get("sts"):
        about.append(f"{content['sts']['pairs']} pairs")
    if about:
        show_table(", ".join([*about, "95 % intervals"]), COLUMNS[kind], [_cells(row) for row in rows])
    tasks = list(dict.fromkeys((task, name) for row in rows for task, found in row.tasks.items() for name in found))
    if tasks:
        lines = [[f"{task} {name}", *(_task_cell(row, task, name) for row in rows)] for task, name in tasks]
        show_table("lm-eval", ["task", *(row.name for row in rows)], lines)


def _cells(row: Row) -> list[str]:
    cells = [row.name, f"{row.params / 1e6:.3f} M"]
    for name in NUMBERS[row.kind]:
        found = row.numbers[name]
        cells.append(percent(found) if name == "agreement" else bounds(found) if name in BOUNDED else plus_minus(found))
    return cells


BOUNDED = ("perplexity", "perplexity_ratio", "spearman")  # their intervals are not symmetric


def bounds(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    digits = 4 if abs(interval.value) <= 1 else 3
    ends = interval.low, interval.high
    value = f"{interval.value:.{digits}f}"
    return value + ("" if None in ends else f" [{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]")


def _task_cell(row: Row, task: str, name: str) -> str:
    value = row.tasks.get(task, {}).get(name)
    return "–" if value is None else f"{value:.4f}"
