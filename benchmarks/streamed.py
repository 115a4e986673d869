"""A Llama of 0.46 B parameters, with random weights, pruned block by block; and the most memory that took.

    python -m benchmarks.streamed [--layers 48]

The dense model is written shard by shard and never held; every run is a process of its own, on 8 x 256 random tokens.
What counts is the peak beside what the process held before, and whether it was announced. Writes results/streamed.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import corp
from corp.calibration.memory import human
from corp.errors import CorpWarning
from corp.io.tables import markdown_table
from corp.measure.footprint import resident_bytes
from corp.storage.streamed.prune import prune_streamed

RESULTS = Path(__file__).parent / "results"
SAMPLES, TOKENS, VOCABULARY = 8, 256, 32_000
RECIPES = {"paper's recipe and the refit": {"sequential": True}}


def write_model(folder: Path, layers: int) -> int:
    """Random weights, one shard per layer; returns their bytes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True, use_cache=False,
        architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = transformers.LlamaForCausalLM(config).state_dict()
    torch.manual_seed(0)
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in state.items():
        if name != "lm_head.weight":
            part = name.split(".")[2] if ".layers." in name else "rest"
            shards.setdefault(f"model-{part}.safetensors", {})[name] = tensor.shape
    size = 0
    for file, shapes in shards.items():
        made = {name: torch.ones(s) if len(s) == 1 else torch.randn(s) / s[-1] ** 0.5 for name, s in shapes.items()}
        save_file(made, folder / file, metadata={"format": "pt"})
        size += sum(tensor.nbytes for tensor in made.values())
    index = {"weight_map": {name: file for file, shapes in shards.items() for name in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


class Listener(corp.Observer):
    """Keeps what was announced."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def prune(folder: Path, out: Path, what: str) -> dict[str, Any]:
    """One run in this process: what was announced, and the peak beside what the process held before."""
    warnings.simplefilter("ignore", CorpWarning)
    draw = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(VOCABULARY, (1, TOKENS), generator=draw)} for _ in range(SAMPLES)]
    recipe, listener = corp.Recipe.paper(mlp=0.5, attn=0.5, **RECIPES[what]), Listener()
    import transformers.models.llama.modeling_llama  # noqa: F401  (the program, not the model)

    before = resident_bytes(torch.device("cpu"))
    report = prune_streamed(folder, batches, recipe, out, observer=listener)
    peak = resident_bytes(torch.device("cpu"), peak=True)
    return {"announced": listener.said[0], "before": before, "peak": peak, "params": report.params}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)  # folder, output, recipe: of a process of its own
    args = parser.parse_args()
    if args.run:
        print(json.dumps(prune(Path(args.run[0]), Path(args.run[1]), args.run[2])))
        return
    with tempfile.TemporaryDirectory(prefix="corp-streamed-") as place:
        size = write_model(Path(place, "dense"), args.layers)
        rows, said = [], []
        for number, what in enumerate(RECIPES):
            command = [
                sys.executable,
                "-m",
                "benchmarks.streamed",
                "--run",
                f"{place}/dense",
                f"{place}/{number}",
                what,
            ]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(run.stdout.splitlines()[-1])
            extra = found["peak"] - found["before"]
            shares = f"{extra / size:.2f}"
            params = " -> ".join(f"{count / 1e6:.0f} M" for count in found["params"])
            rows.append((what, params, human(size), human(extra), shares, human(found["before"])))
            said.append(f"- {what}: {found['announced']}")
            print(rows[-1], said[-1], flush=True)
    header = ("run", "parameters", "dense weights", "peak beside the program", "of the dense weights", "program")
    text = (
        f"Llama, {args.layers} layers, float32, {SAMPLES} x {TOKENS} tokens, one block in memory at a time.\n\n"
        f"{markdown_table(header, rows)}\n\nAnnounced before:\n\n" + "\n".join(said) + "\n"
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "streamed.md").write_text(text)


if __name__ == "__main__":
    main()
