"""Prune a model that corp has no table for, and run the whole contract on it first.

python examples/any_model.py

The model is T5, small and random so that this runs anywhere. Two kinds of input show how data reach a model: a dict as
a processor or tokenizer makes it, and `forward=` for everything else.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

import corp
from corp.testing import check_model


def processed(samples: int = 8) -> dict[str, Tensor]:
    """What `processor(text=..., text_target=..., return_tensors="pt")` gives: a dict of the model's own arguments."""
    ids = torch.randint(3, 100, (samples, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :6]}


def forward(model: nn.Module, batch: Any) -> Any:
    """For batches that are no dict of arguments: call the model as your own code does."""
    questions, answers = batch
    return model(input_ids=questions, decoder_input_ids=answers)


def main() -> None:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    check_model(model, [processed() for _ in range(4)])

    pairs = [(torch.randint(3, 100, (8, 12)), torch.randint(3, 100, (8, 6))) for _ in range(8)]
    print(corp.find_sites(model, pairs[0], forward))
    result = corp.prune(model, pairs, corp.Recipe(mlp=0.3, vo=0.25), forward=forward)
    print(result.report)


if __name__ == "__main__":
    main()
