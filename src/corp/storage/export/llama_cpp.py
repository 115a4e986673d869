"""A GGUF file run by llama.cpp, out of the package xllamacpp: the proof of a GGUF export.

It stands alone and runs in a process of its own (`python llama_cpp.py FILE TOKEN …` prints the log-probabilities of
the next token as JSON), because llama.cpp ends its process when a file is wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def available() -> bool:
    return find_spec("xllamacpp") is not None


def next_log_probabilities(file: Path, tokens: list[int], vocabulary: int) -> list[float]:
    """Of every token behind `tokens`, computed in another process; RuntimeError with llama.cpp's words if it fails."""
    command = [sys.executable, __file__, str(file), str(vocabulary), *map(str, tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        telling = [line for line in lines if "error" in line.lower() or "ASSERT" in line]
        raise RuntimeError((telling or lines or [f"it ended with {done.returncode}"])[-1])
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


class Llama:
    """One loaded model: in float32 throughout, cache included, on `threads` threads, one sequence at a time."""

    def __init__(self, file: Path, *, context: int = 256, threads: int = 1) -> None:
        import xllamacpp

        params: Any = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel = str(file), context, 1
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server: Any = xllamacpp.Server(params)

    def complete(self, tokens: list[int], count: int = 1, **options: Any) -> dict[str, Any]:
        """llama.cpp's answer to a greedy completion of `count` tokens."""
        request = {"prompt": tokens, "n_predict": count, "temperature": 0.0, "logprobs": 1, **options}
        made: dict[str, Any] = self.server.handle_completions(request)
        if "choices" not in made:
            raise RuntimeError(f"llama.cpp: {made}")
        return made

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The `count` likeliest tokens, one after the other."""
        return [one["id"] for one in self._content(self.complete(tokens, count, ignore_eos=True))]

    def next(self, tokens: list[int], vocabulary: int) -> list[float]:
        """The log-probability of every token of the vocabulary behind `tokens`."""
        (only,) = self._content(self.complete(tokens, logprobs=vocabulary, n_probs=vocabulary))
        found = dict.fromkeys(range(vocabulary), float("-inf"))
        found.update({one["id"]: one["logprob"] for one in only["top_logprobs"]})
        return [found[token] for token in range(vocabulary)]

    def score(self, tokens: list[int]) -> list[float]:
        """The log-probability of every token but the first, each behind those before it."""
        scores = []
        for place in range(1, len(tokens)):
            # The bias decides what is drawn; the probability that is reported does not know of it.
            made = self.complete(tokens[:place], logit_bias=[[tokens[place], 1e6]], cache_prompt=True)
            (only,) = self._content(made)
            if only["id"] != tokens[place]:
                raise RuntimeError(f"llama.cpp drew token {only['id']}, not {tokens[place]}")
            scores.append(float(only["logprob"]))
        return scores

    @staticmethod
    def _content(made: dict[str, Any]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = made["choices"][0]["logprobs"]["content"]
        return content


def main(file: str, vocabulary: str, *tokens: str) -> None:
    prompt = list(map(int, tokens))
    print(json.dumps(Llama(Path(file), context=max(64, 2 * len(prompt))).next(prompt, int(vocabulary))))


if __name__ == "__main__":
    main(*sys.argv[1:])
