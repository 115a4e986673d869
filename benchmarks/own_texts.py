"""What calibration texts that the model writes itself add to a few given ones: SmolLM2-135M at 0.823 of its parameters.

    CORP_ASSETS=... python -m benchmarks.own_texts [--own 120]

The protocol is that of benchmarks/smollm2.py, whose results are the rows without own texts. Finished rows stay in
results/own_texts.json; writes results/own_texts.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import corp
from benchmarks import smollm2
from corp.data.written import with_own_texts
from corp.errors import CorpWarning
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
SHARE = smollm2.SHARES[0]
GIVEN = 40
MLP = round((1 - SHARE) * smollm2.PARAMS / smollm2.MLPS, 4)
RECIPES = {
    "paper": Recipe.paper(mlp=MLP),
    "default, the paper's ranking": Recipe(target_params=SHARE, rank="combined"),
    "default": Recipe(target_params=SHARE),
    "for gguf": Recipe(target_params=SHARE, **smollm2.HEADS),
    "for transformers": Recipe(target_params=SHARE, allocate="uniform", **smollm2.HEADS),
}


def table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        (name, f"{row['params'] / 1e6:.3f} M", *(f"{row[text]:.1f}" for text in ("WikiText-2", "C4")))
        for name, row in found.items()
    ]
    head = ("SmolLM2-135M-Instruct, calibrated on", "parameters", "WikiText-2", "C4")
    return (
        f"{markdown_table(head, rows)}\n\nPerplexity on 24 x 512 tokens each. The given texts are the first {GIVEN} "
        "sequences of 512 tokens of C4, as in smollm2.md, where the rows without own texts come from "
        "(the default's at that time); rows of 40 and 120 own texts are older than those of 80, which `corp prune` "
        "takes unasked. Own texts have 512 tokens, drawn at temperature 1 behind eight tokens of a given one "
        "(`corp.data.written`, `--own-texts`).\n"
    )


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs texts")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--own", type=int, default=2 * GIVEN, help="sequences that the model writes; corp prune takes 80"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CorpWarning)
    path = RESULTS / "own_texts.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.is_file() else {}
    known = json.loads((RESULTS / "smollm2.json").read_text())["smollm2"]
    for name in RECIPES:
        if row := known.get(f"{name}, {SHARE:g}"):
            found[f"{GIVEN} given texts: {name}"] = row
    model, calibration, _, measure = smollm2.load(Path(assets), calibrated=GIVEN)
    start = time.process_time()
    both = with_own_texts(model, calibration, args.own)
    print(f"{args.own} texts written in {time.process_time() - start:.0f} s of CPU time", flush=True)
    for name in args.recipes:
        title = f"{GIVEN} given and {args.own} own texts: {name}"
        if title not in found:
            pruned = corp.prune(model, both, RECIPES[name]).model
            found[title] = {"params": count_params(pruned), **measure(pruned)}
            print(title, found[title], f"{time.process_time() - start:.0f} s", flush=True)
            write_text(path, json.dumps(found, indent=1) + "\n")
            write_text(path.with_suffix(".md"), table(dict(sorted(found.items()))))


if __name__ == "__main__":
    main()
