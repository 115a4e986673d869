"""Tokens per second in llama.cpp: a dense model, one pruned alike in all layers, and one with a width per layer.

All three are GGUF files in float32 with the same number of MLP channels removed, loaded in one process and timed in
turn, on one thread. A token reads every weight once, so the weights that are left promise a speed-up; the last column
says what is reached of it. Weights do not change the time, so widths are cut without calibration.

    python scripts/fetch_smollm2.py
    python -m benchmarks.served [--model FOLDER] [--sparsities 0.3 0.5] [--tokens 32] [--rounds 15]
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import corp
from benchmarks.params import shapes_only_plan
from corp.adapters import hf_models
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.measure.timing import interleave, speed_up, summarize
from corp.recipe import Recipe
from corp.storage.export.decoder import decoder_of
from corp.storage.export.gguf_file import vocabulary_of, write_gguf
from corp.storage.export.llama_cpp import Llama
from corp.surgery.apply import shrink

RESULTS = Path(__file__).parent / "results"
FOLDER = Path.home() / ".cache" / "corp" / "smollm2-135m"
PROMPT = list(range(100, 116))
COLUMNS = ("model", "MLP removed", "weights", "tokens/s", "speed-up", "95 % interval", "reached of the promise")


def recipes(layers: int, sparsity: float) -> Iterator[tuple[str, Recipe]]:
    """The same share of every layer, and shares that grow from half of it to one and a half."""
    yield "uniform", Recipe(mlp=sparsity)
    shares = [sparsity * (0.5 + number / max(1, layers - 1)) for number in range(layers)]
    yield (
        "per layer",
        Recipe(mlp=sparsity, overrides={f"model.layers.{i}.*": {"mlp": share} for i, share in enumerate(shares)}),
    )


def narrowed(model: nn.Module, recipe: Recipe) -> nn.Module:
    """A copy with the widths of the recipe and no new biases."""
    small = copy.deepcopy(model)
    plan = shapes_only_plan(small, recipe)
    plan = replace(plan, sites=tuple(replace(site, intercept=False) for site in plan.sites))
    shrink(small, corp.find_sites(small), plan)
    return small


def served(model: nn.Module, tokenizer: Any, path: Path) -> Llama:
    decoder = decoder_of(model)
    vocabulary = vocabulary_of(tokenizer, decoder.config["vocab_size"])
    write_gguf(decoder, vocabulary, path, name=path.stem, quant="f32")
    return Llama(path, context=len(PROMPT) + 512)


def generation(llama: Llama, tokens: int) -> Callable[[], object]:
    return partial(llama.complete, PROMPT, tokens, ignore_eos=True)


def measure(folder: Path, sparsity: float, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One row per variant, the dense model first."""
    model, tokenizer = hf_models.create(str(folder)).float(), hf_models.tokenizer(str(folder))
    variants = {"dense": model}
    variants |= {name: narrowed(model, recipe) for name, recipe in recipes(len(model.model.layers), sparsity)}  # type: ignore[union-attr, arg-type]
    with tempfile.TemporaryDirectory() as temporary:
        loaded = [
            served(variant, tokenizer, Path(temporary, f"{number}.gguf"))
            for number, variant in enumerate(variants.values())
        ]
        timed = interleave([generation(llama, tokens) for llama in loaded], rounds=rounds)
        del loaded
    dense = count_params(model)
    rows = []
    for (name, variant), seconds in zip(variants.items(), timed, strict=True):
        ratio, weights = speed_up(timed[0], seconds), count_params(variant) / dense
        rows.append(
            {
                "model": f"{folder.name}, {name}",
                "sparsity": 0.0 if name == "dense" else sparsity,
                "weights": weights,
                "tokens_per_second": tokens / summarize(seconds).p50,
                "speed_up": [ratio.value, ratio.low, ratio.high],
                "reached": ratio.value * weights,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["model"],
            f"{row['sparsity']:.0%}",
            f"{row['weights']:.3f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speed_up'][0]:.2f}",
            f"{row['speed_up'][1]:.2f} to {row['speed_up'][2]:.2f}",
            f"{row['reached']:.2f}",
        )
        for row in rows
    ]
    return f"{markdown_table(COLUMNS, cells)}\n\n{platform.processor() or platform.machine()}, one thread, float32.\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.3, 0.5])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = [row for s in args.sparsities for row in measure(args.model, s, args.tokens, args.rounds)]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "served.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "served.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
