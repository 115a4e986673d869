"""Runs a GGUF file with llama.cpp, from the package xllamacpp, to verify a GGUF export.

It has no dependencies on corp and runs in a separate process (`python llama_cpp.py FILE TOKEN …` prints the
log-probabilities of the next token as JSON), because llama.cpp ends its process if a file is invalid.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ALL = 1 << 24  # more than the tokens of any vocabulary


def available() -> bool:
    return find_spec("xllamacpp") is not None


def next_log_probabilities(file: Path, tokens: list[int]) -> list[float]:
    """Log-probabilities of every token after `tokens`, computed in another process, which may fail (RuntimeError)."""
    command = [sys.executable, "-P", __file__, str(file), *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        telling = [line for line in lines if "error" in line.lower() or "ASSERT" in line]
        raise RuntimeError((telling or lines or [f"it ended with {done.returncode}"])[-1])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Llama:
    """One loaded model: in float32 throughout, cache included, on one thread, one sequence at a time."""

    def __init__(self, file: Path, *, context: int = 256) -> None:
        import xllamacpp

        params: Any = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), context, 1
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server: Any = xllamacpp.Server(params)
        self._plain: list[int] = []  # a token that llama.cpp reports

    def complete(self, tokens: list[int], count: int, **options: Any) -> dict[str, Any]:
        """llama.cpp's answer to a greedy completion of `count` tokens."""
        request = {"prompt": tokens, "n_predict": count, "temperature": 0.0, "cache_prompt": True, **options}
        made: dict[str, Any] = self.server.handle_completions(request)
        if "choices" not in made:
            raise RuntimeError(f"llama.cpp: {made}")
        return made

    def likeliest(self, tokens: list[int], count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens after `tokens`, with their log-probabilities."""
        # The drawn token does not matter here, but llama.cpp reports nothing for parts of a UTF-8 character.
        found = next(filter(None, (self._told(tokens, drawn, count) for drawn in (*self._plain, *tokens))), None)
        if found is None:
            raise RuntimeError("llama.cpp: no token of the prompt is a piece of text")
        self._plain = [found["id"]]
        return [(one["id"], float(one["logprob"])) for one in found["top_logprobs"]]

    def distribution(self, tokens: list[int]) -> list[float]:
        """The log-probability of every token after `tokens`, by id."""
        values = [value for _, value in sorted(self.likeliest(tokens, ALL))]
        # llama.cpp normalises in float32, where a sum of thousands of small numbers is inexact.
        total = math.log(math.fsum(map(math.exp, values)))
        return [value - total for value in values]

    def _told(self, tokens: list[int], drawn: int, count: int) -> dict[str, Any] | None:
        """What llama.cpp reports for one step that draws the token `drawn`; None if it withholds that.

        A bias decides what is drawn; it does not change the reported probabilities.
        """
        made = self.complete(tokens, 1, logit_bias=[[drawn, 1e6]], logprobs=count, n_probs=count)
        told = made["choices"][0]["logprobs"]
        first: dict[str, Any] | None = told["content"][0] if told and told["content"] else None
        return first if first and first["id"] == drawn else None


def main(file: str, *tokens: str) -> None:
    prompt = list(map(int, tokens))
    print(json.dumps(Llama(Path(file), context=max(64, 2 * len(prompt))).distribution(prompt)))


if __name__ == "__main__":
    main(*sys.argv[1:])
