"""How well a run's time and memory are predicted: every stage's estimate beside its outcome, for several shapes.

Weights and data are random: the time depends on neither. The factors in corp/measure/estimate.py were set so that the
last column is near 1. --cpu-time compares CPU seconds of one thread instead, for machines that are busy.

    python -m benchmarks.estimate --models deit_tiny deit_small llama --samples 256
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import corp
from corp.io.observer import Observer

RECIPES = {
    "paper": corp.Recipe.paper(mlp=0.5, attn=0.5),
    "default": corp.Recipe(mlp=0.5, attn=0.5),
    "budget": corp.Recipe(target_macs=0.6),
}


class Announced(Observer):
    """Takes the estimate, and is silent else."""

    def estimate(self, make: Any) -> Any:
        return make()


def deit(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(f"{name}_patch16_224", pretrained=False).eval()
    return model


def llama() -> nn.Module:
    """SmolLM2-135M's shape with fewer layers and words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).eval()
    return model


def data(name: str, samples: int) -> list[Any]:
    """Batches of 32 images, or of 8 sequences of 256 tokens."""
    if name == "llama":
        return [{"input_ids": torch.randint(8192, (8, 256))} for _ in range(samples // 8)]
    return list(torch.randn(samples, 3, 224, 224).split(32))


def rows(name: str, samples: int, recipes: list[str]) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    model, batches = (llama() if name == "llama" else deit(name)), data(name, samples)
    for kind in recipes:
        result = corp.prune(model, batches, RECIPES[kind], observer=Announced())
        assert result.report.run is not None
        for stage in result.report.run["stages"]:
            yield {"model": name, "recipe": kind, **stage}
        yield {"model": name, "recipe": kind, "stage": "memory", **result.report.run["memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["deit_tiny", "deit_small", "llama"])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time
    found = []
    for name in options.models:
        for row in rows(name, options.samples, options.recipes):
            found.append(row)
            real, guess = row.get("seconds", row.get("peak", 0)), row["estimated"]
            unit = "s" if "seconds" in row else "B"
            print(
                f"{name:12} {row['recipe']:8} {row['stage']:26} {guess:12.3g} {real:12.3g} {unit}"
                f"  {real / guess if guess else float('nan'):6.2f}",
                flush=True,
            )
            if options.out:  # after every row, so that a run that is stopped keeps what it had
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
