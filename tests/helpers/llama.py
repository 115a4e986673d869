"""What llama.cpp says of a sequence of tokens, step by step."""

from __future__ import annotations

from corp.storage.export.llama_cpp import Llama


def greedy(llama: Llama, tokens: list[int], count: int) -> list[int]:
    """The `count` likeliest tokens, one after the other."""
    made = list(tokens)
    for _ in range(count):
        made.append(llama.likeliest(made, 1)[0][0])
    return made[len(tokens) :]


def score(llama: Llama, tokens: list[int]) -> list[float]:
    """The log-probability of every token but the first, each behind those before it."""
    return [llama.distribution(tokens[:place])[tokens[place]] for place in range(1, len(tokens))]
