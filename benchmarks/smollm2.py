"""SmolLM2-135M-Instruct as an entry of benchmarks/language.py: data, recipes, and what other methods reach."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from corp.data import text
from corp.evaluate.language import NextTokens
from corp.evaluate.run import Contender, side_by_side
from corp.recipe import Recipe

FOLDER = Path(os.environ.get("CORP_SMOLLM2", Path.home() / ".cache" / "corp" / "smollm2-135m"))
PARAMS, MLPS = 134_515_008, 30 * 3 * 576 * 1536
SHARES = (0.823, 0.9, 0.8, 0.7)  # of the dense parameters; the first is where other methods were measured
HEADS: dict[str, Any] = {"rotary": "shared", "equal_heads": True, "output": 0.0}  # what a served format holds
PROTOCOL = (
    "calibrated on the first 40 sequences of 512 tokens of C4 (prefix and completion, documents joined by blank "
    "lines); perplexity on the first 24 x 512 tokens of WikiText-2's test text, and on the last 24 x 512 of the same "
    "C4 sample, which calibration does not see. 'for gguf' has one head width and one set of rotary pairs, 'for "
    "transformers' also one MLP width; the presets remove MLP channels only. Peers: their own code on the same tokens, "
    "run apart"
)


def load(assets: Path, *, calibrated: int = 40, judged: int = 24, length: int = 512) -> tuple[Any, ...]:
    """The model, what calibrates it (C4), what judges it (WikiText-2, and other C4 texts), and how."""
    from corp.adapters import hf_models

    if not FOLDER.is_dir():
        sys.exit(f"{FOLDER} is not there: scripts/fetch_smollm2.py makes it (CORP_SMOLLM2 points at another folder)")
    model, tokenizer = hf_models.create(str(FOLDER)).float(), hf_models.tokenizer(str(FOLDER))
    texts = assets / "language" / "text"
    records = map(json.loads, (texts / "c4-sample.jsonl").read_text(encoding="utf-8").splitlines())
    joined = "\n\n".join(record["prefix"] + record["gold_completion"] for record in records)
    c4 = tokenizer(joined, verbose=False)["input_ids"]
    wikitext = tokenizer((texts / "wikitext-2-test.raw").read_text(encoding="utf-8"), verbose=False)["input_ids"]
    assert len(c4) >= (calibrated + judged) * length
    parts = (c4[: calibrated * length], wikitext[: judged * length], c4[-judged * length :])
    calibration, held_out, unseen = (sequences(ids, length) for ids in parts)

    def measure(pruned: nn.Module) -> dict[str, float]:
        return {"WikiText-2": perplexity(pruned, held_out), "C4": perplexity(pruned, unseen)}

    return model, calibration, held_out, measure


def perplexity(model: nn.Module, batches: text.TextBatches) -> float:
    metric = NextTokens()
    side_by_side(None, [Contender(model, metric)], batches.scored())
    return metric.perplexity


def sequences(ids: list[int], length: int) -> text.TextBatches:
    """Token ids, cut every `length`."""
    spans = [text.Span(start, start + length, start + 1) for start in range(0, len(ids) - length + 1, length)]
    return text.TextBatches(
        torch.tensor(ids, dtype=torch.int32), spans, pad=0, batch_size=4, description=f"{len(spans)} x {length} tokens"
    )


def recipes() -> Iterator[tuple[str, Recipe]]:
    """Every preset at every size; MLP sparsities are those that leave the share of the parameters."""
    for share in SHARES:
        yield f"default, {share:g}", Recipe(target_params=share)
        yield f"for gguf, {share:g}", Recipe(target_params=share, **HEADS)
        yield f"for transformers, {share:g}", Recipe(target_params=share, allocate="uniform", **HEADS)
        mlp = round((1 - share) * PARAMS / MLPS, 4)
        for preset in ("paper", "magnitude", "wanda", "vbp", "flap", "grail"):
            yield f"{preset}, {share:g}", Recipe.preset(preset, mlp=mlp)


def peer(share: float, wikitext: float) -> dict[str, float]:
    return {"params": share * PARAMS, "WikiText-2": wikitext}


PEERS = {
    "FLAP, its code, 0.823": peer(0.823, 67.8),
    "MoDeGPT, public code, 0.823": peer(0.823, 87.6),
    "SliceGPT, its code, 0.826": peer(0.826, 370.0),
    "FLAP, its code, 0.75": peer(0.75, 150.0),
    "MoDeGPT, public code, 0.75": peer(0.75, 124.0),
    "SliceGPT, its code, 0.75": peer(0.75, 588.0),
}
