"""Prune a language model from Python: batches are dicts, padding is marked by the attention mask.

A tiny GPT-2 with random weights stands in for yours (GPT2LMHeadModel.from_pretrained("...")), so this runs anywhere.
"""

from __future__ import annotations

import torch

import corp

# isort: split
from transformers import GPT2Config, GPT2LMHeadModel

from corp.evaluate.language import IGNORED, NextTokens
from corp.evaluate.run import Contender, side_by_side
from corp.measure.cost import count_params

CONFIG = GPT2Config(vocab_size=100, n_positions=24, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)


def batches(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of unequal length, padded on the right."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(100, (8, 24), generator=draw)
        mask = (torch.arange(24) < torch.randint(8, 25, (8, 1), generator=draw)).long()
        made.append({"input_ids": ids, "attention_mask": mask})
    return made


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(CONFIG).eval()
    result = corp.prune(model, batches(40, seed=1), corp.Recipe.paper(mlp=0.5, attn=0.25))
    print(f"parameters: {count_params(model)} -> {count_params(result.model)}")

    scored = []
    for batch in batches(5, seed=2):
        following = batch["input_ids"].roll(-1, 1)  # the next token of every position …
        ends = batch["attention_mask"].roll(-1, 1) == 0
        ends[:, -1] = True  # … where there is one
        scored.append((batch, following.masked_fill(ends, IGNORED)))
    metric = NextTokens()
    side_by_side(model, [Contender(result.model, metric)], scored)
    for name, interval in metric.intervals().items():
        if interval:
            print(f"{name}: {interval.value:.4f}")


if __name__ == "__main__":
    main()
