"""corp eval on texts: perplexity of language models, sentence embeddings of encoders, tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from corp.calibration.batches import placement, without_cache
from corp.cli import models as m
from corp.cli.console import note, progress, show_table
from corp.cli.evaluation import Evaluated, Evaluation, ModelScores, known_of
from corp.cli.texts import sequence_length, sequences_per_batch
from corp.data import sts, text
from corp.errors import DataError
from corp.evaluate.language import NextTokens
from corp.evaluate.run import judged
from corp.evaluate.sentences import Embeddings, sts_spearman
from corp.evaluate.tasks import require, run_tasks
from corp.measure.cost import count_params

COLUMNS = {
    m.CAUSAL: ("model", "params", "perplexity", "/ dense", "agreement %", "KL from dense"),
    m.ENCODER: ("model", "params", "cosine to dense", "STS Spearman"),
}
NUMBERS = {m.CAUSAL: ("perplexity", "perplexity_ratio", "agreement", "kl"), m.ENCODER: ("cosine", "spearman")}


def evaluate_texts(loaded: dict[str, nn.Module], asked: Evaluation) -> Evaluated:
    """Measure the models on the texts; the others are compared with the first."""
    first, models = next(iter(loaded)), list(loaded.values())
    kind = m.kind_of(models[0])
    tasks = [task.strip() for task in (asked.tasks or "").split(",") if task.strip()]
    _check(kind, asked, tasks, alone=len(loaded) == 1)
    if tasks:
        require()
    tokenizer = m.tokenizer_of(first, asked.text.tokenizer)
    rows = [
        ModelScores(name, count_params(model), dict.fromkeys(NUMBERS[kind]), {"tasks": None})
        for name, model in loaded.items()
    ]
    content: dict[str, Any] = {
        "kind": kind,
        "seed": asked.seed,
        "dense": first if len(loaded) > 1 else None,
        "data": None,
    }
    if asked.data:
        batches = text_batches(models[0], tokenizer, kind, asked)
        files = [str(path) for path in asked.data]
        counts = {"sequences": batches.samples, "tokens": batches.tokens}
        content["data"] = {"files": files, **counts, "sequences_are": batches.describe()}
        for row, metric in zip(rows, judge(kind, models, batches), strict=True):
            row.numbers |= known_of(
                metric.intervals(), NUMBERS[kind], ("perplexity",) if row is rows[0] else NUMBERS[kind]
            )
    if asked.sts is not None:
        content["sts"] = {"file": str(asked.sts), "pairs": _measure_sts(models, rows, tokenizer, asked)}
    if tasks:
        for row, model in zip(rows, models, strict=True):
            size = asked.batch_size or 8
            row.extra["tasks"] = run_tasks(model, tokenizer, tasks, batch_size=size, limit=asked.limit)
    content["models"] = [row.to_dict() for row in rows]
    return content, partial(show_texts, content, rows)


def _check(kind: str, asked: Evaluation, tasks: list[str], *, alone: bool) -> None:
    if kind == m.CAUSAL and asked.sts is not None:
        raise DataError("--sts is for sentence encoders; give a causal language model --data or --tasks")
    if kind == m.ENCODER and tasks:
        raise DataError("--tasks is for causal language models; give an encoder --data or --sts")
    if kind == m.ENCODER and (asked.stride is not None or asked.per_document):
        raise DataError("--stride and --per-document are for perplexity, which an encoder does not have")
    if asked.stride is not None and asked.per_document:
        raise DataError("--stride moves windows over the whole text, so it cannot be combined with --per-document")
    if not (asked.data or asked.sts or tasks):
        raise DataError("nothing to measure on: give --data TEXTS" + (" or --sts FILE" if kind == m.ENCODER else ""))
    if kind == m.ENCODER and alone and asked.sts is None:
        raise DataError(
            "nothing to measure: there is no other encoder to compare with; give --dense MODEL, or --sts FILE"
        )


def text_batches(model: nn.Module, tokenizer: Any, kind: str, asked: Evaluation) -> text.TextBatches:
    length = sequence_length(model, tokenizer, asked.text.seq_len)
    size = asked.batch_size or (sequences_per_batch(tokenizer, length) if kind == m.CAUSAL else None)
    chosen: dict[str, Any] = {"length": length, "field": asked.text.field, "batch_size": size}
    if kind == m.ENCODER or asked.per_document:
        drawn: dict[str, Any] = {"samples": asked.samples, "seed": asked.seed, "bos": kind == m.CAUSAL}
        return text.one_per_document(asked.data, tokenizer, **chosen, **drawn)
    if asked.samples is not None:
        if asked.stride is not None:
            raise DataError("--samples draws documents and packs them; --stride goes over the whole text: give one")
        return text.packed(asked.data, tokenizer, **chosen, samples=asked.samples, seed=asked.seed)
    batches = text.windows(asked.data, tokenizer, **chosen, stride=asked.stride)
    left = len(batches.ids) - batches.spans[-1].end
    if left:
        note(f"the last {left} of {len(batches.ids)} tokens do not fill a window of {length} and are left out")
    return batches


def judge(kind: str, models: Sequence[nn.Module], batches: text.TextBatches, *, keep: bool = False) -> list[Any]:
    """The metric of every model, compared with the first, in one pass; `keep` keeps the embeddings of encoders."""
    metric: Any = NextTokens if kind == m.CAUSAL else partial(Embeddings, keep)
    # Models with a head return hidden states only on request.
    asking = (({**batch, "output_hidden_states": True}, mask) for batch, mask in batches.masked())
    data = batches.scored() if kind == m.CAUSAL else asking
    where = f"evaluating on {placement(models[0])[0]}"
    with progress(where, batches.samples, "sequences") as advance, without_cache(*models):
        return judged(models, metric, data, models[0] if len(models) > 1 else None, advance)


def _measure_sts(models: Sequence[nn.Module], rows: Sequence[ModelScores], tokenizer: Any, asked: Evaluation) -> int:
    """Measure the rank correlation with human scores; return the number of pairs."""
    assert asked.sts is not None
    pairs = sts.read_pairs(asked.sts)
    length = sequence_length(models[0], tokenizer, asked.text.seq_len)
    batches = text.of_texts(pairs.sentences, tokenizer, length=length, batch_size=asked.batch_size or 64)
    for row, metric in zip(rows, judge(m.ENCODER, models, batches, keep=True), strict=True):
        row.numbers["spearman"] = sts_spearman(torch.cat(metric.kept), pairs.scores)
        if row is not rows[0] and not asked.data:  # the sentences of the pairs are also used for the comparison
            row.numbers |= metric.intervals()
    return len(pairs.scores)


def show_texts(content: dict[str, Any], rows: Sequence[ModelScores]) -> None:
    about = []
    if content["data"]:
        about.append(f"{content['data']['tokens']} tokens ({content['data']['sequences_are']})")
    if content.get("sts"):
        about.append(f"{content['sts']['pairs']} pairs")
    if about:
        title = ", ".join([*about, "95 % intervals"])
        show_table(title, COLUMNS[content["kind"]], [row.cells() for row in rows])
    found = [
        {
            f"{task} {name}": value
            for task, numbers in (row.extra["tasks"] or {}).items()
            for name, value in numbers.items()
        }
        for row in rows
    ]
    if names := dict.fromkeys(name for numbers in found for name in numbers):
        lines = [[name, *(f"{numbers[name]:.4f}" if name in numbers else "–" for numbers in found)] for name in names]
        show_table("lm-eval", ["task", *(row.name for row in rows)], lines)
