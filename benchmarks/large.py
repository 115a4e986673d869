"""A model of a billion parameters, with random weights, pruned on this machine; and the most memory that took.

    python -m benchmarks.large [--family llama|opt] [--layers 21] [--memory 4GB]

The statistics go to disk, a few layers per pass over 8 x 512 random tokens. Writes results/large.md.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import corp
from corp import Recipe
from corp.calibration.memory import human, parse_bytes
from corp.calibration.settings import Settings
from corp.errors import CorpWarning
from corp.io.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
SAMPLES, TOKENS = 8, 512
LIMIT = 24 * 2**30


def build(family: str, layers: int) -> Any:
    """About 0.055 B parameters per layer, and 0.13 B in the embeddings."""
    import torch
    import transformers

    torch.manual_seed(0)
    common = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": layers, "tie_word_embeddings": True}
    if family == "llama":
        config: Any = transformers.LlamaConfig(
            **common, intermediate_size=5632, num_attention_heads=32, num_key_value_heads=8, use_cache=False
        )
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.OPTConfig(
        **common, ffn_dim=8192, num_attention_heads=32, word_embed_proj_dim=2048, use_cache=False
    )
    return transformers.OPTForCausalLM(config).eval()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=("llama", "opt"), default="llama")
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--memory", default="4GB")
    args = parser.parse_args()
    import torch

    warnings.simplefilter("ignore", CorpWarning)
    start = time.perf_counter()
    model = build(args.family, args.layers)
    params = sum(p.numel() for p in model.parameters())
    rows = [("built", f"{params / 1e9:.2f} B parameters", peak(), time.perf_counter() - start)]
    print(rows[-1], flush=True)
    draw = torch.Generator().manual_seed(1)
    batches = [{"input_ids": torch.randint(32_000, (1, TOKENS), generator=draw)} for _ in range(SAMPLES)]
    with tempfile.TemporaryDirectory(prefix="corp-large-") as folder:
        settings = Settings(tokens="all", memory=parse_bytes(args.memory))
        stats = corp.calibrate(model, batches, out=Path(folder, "stats"), settings=settings)
        rows.append(("calibrated", f"{stats.samples} x {TOKENS} tokens", peak(), time.perf_counter() - start))
        print(rows[-1], flush=True)
        plan = corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5))
        rows.append(("planned", f"{len(plan.sites)} sites", peak(), time.perf_counter() - start))
        print(rows[-1], flush=True)
        result = corp.apply(model, stats, plan)
        after = sum(p.numel() for p in result.model.parameters())
        rows.append(("applied", f"{after / 1e9:.2f} B parameters", peak(), time.perf_counter() - start))
        print(rows[-1], flush=True)
    cells = [(what, made, human(most), f"{seconds:.0f}") for what, made, most, seconds in rows]
    table = markdown_table(("step", "", "most memory so far", "seconds"), cells)
    verdict = "within" if peak() <= LIMIT else "MORE THAN"
    RESULTS.mkdir(exist_ok=True)
    text = f"{args.family}, {args.layers} layers, sums within {args.memory}: {verdict} {human(LIMIT)}.\n\n{table}\n"
    (RESULTS / "large.md").write_text(text)


if __name__ == "__main__":
    main()
