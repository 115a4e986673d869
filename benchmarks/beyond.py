"""Past the paper, one idea at a time, at the cost of the paper's recipe: what each adds, on every real model at hand.

For each model and each sparsity s the budget is what the paper's recipe costs that removes s of MLP channels and of
Q/K dimensions; every step of the ladder keeps to it. The first and the last also run at
0.75 and 0.4 of the dense operations.
Divergence is from the dense model's output (KL of classes or next tokens, relative squared error of embeddings) per
sample, and steps are compared sample by sample: the interval is that of the paired difference to the step before.
Finished rows stay in results/beyond.json and are not made again.

    CORP_ASSETS=... python -m benchmarks.beyond [--models demo deit minilm stories] [--sparsities 0.5] [--samples 1000]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from benchmarks import deit_tiny, language
from corp.data import digits
from corp.data.images import ImageBatches, list_images
from corp.errors import CorpWarning
from corp.io.files import write_text
from corp.io.tables import markdown_table
from corp.measure.closeness import Reference
from corp.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
SPARSITIES = (0.3, 0.5, 0.7)
LADDER: dict[str, Callable[[float], Recipe]] = {
    "paper": lambda target: Recipe.paper(target_macs=target),
    "+ exact removal cost": lambda target: Recipe.paper(target_macs=target, rank="exact"),
    "+ best subspace of Q/K": lambda target: Recipe.paper(target_macs=target, rank="exact", attn_basis="subspace"),
    "+ allocation, values too": lambda target: Recipe(target_macs=target, sequential=False, output=0.0),
    "+ output head": lambda target: Recipe(target_macs=target, sequential=False),
    "+ refit (default)": lambda target: Recipe(target_macs=target),
    "+ merged tokens": lambda target: Recipe(target_macs=target, tokens="auto"),
}
ENDS = ["paper", "+ refit (default)", "+ merged tokens"]
TOGETHER = 10  # samples per batch that is judged: the pairs that intervals are of


@dataclass(frozen=True)
class Subject:
    """A model, what calibrates it, what it is judged on, and its headline number."""

    model: nn.Module
    calibration: Any
    judged: Sequence[Any]
    headline: Callable[[nn.Module], dict[str, float]]
    images: bool = False


def demo(_assets: Path, samples: int) -> Subject:
    split = digits.load_split()
    images, labels = split.test_images[:samples], split.test_labels[:samples]
    calibration = list(split.calibration_images.split(50))
    return Subject(digits.load_model(), calibration, images.split(TOGETHER), _top1(images, labels), images=True)


def deit(assets: Path, samples: int) -> Subject:
    setup = deit_tiny.Setup(assets, calibrate=False)
    every = max(1, round(len(setup.labels) / samples))  # one image per class, in order: take them from all over
    images, labels = torch.cat(setup.images)[::every], setup.labels[::every]
    calibration = ImageBatches(list_images([assets / "vision" / "calibration"]), setup.transform)
    return Subject(setup.model, calibration, images.split(TOGETHER), _top1(images, labels), images=True)


def _top1(images: Tensor, labels: Tensor) -> Callable[[nn.Module], dict[str, float]]:
    batches = list(images.split(50))
    return lambda model: {"top-1 %": deit_tiny.accuracy(model, batches, labels)}


def of_texts(load: Callable[[Path], language.Benchmark]) -> Callable[[Path, int], Subject]:
    def subject(assets: Path, samples: int) -> Subject:
        loaded = load(assets)
        judged = [_rows(batch, slice(i, i + TOGETHER)) for batch in loaded.judged for i in range(0, 50, TOGETHER)]
        some = [batch for batch in judged if len(batch["input_ids"])][: samples // TOGETHER]
        return Subject(loaded.model, loaded.calibration, some, loaded.measure)

    return subject


def _rows(batch: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {key: value[rows] for key, value in batch.items()}


MODELS: dict[str, Callable[[Path, int], Subject]] = {
    "demo": demo,
    "deit": deit,
    "minilm": of_texts(partial(language.load_minilm, every=True)),
    "stories": of_texts(language.MODELS["stories"].load),
}


def cost_of_paper(model: nn.Module, stats: corp.Statistics, sparsity: float) -> float:
    """The share of the dense operations that the paper's recipe leaves."""
    recipe = Recipe.paper(mlp=sparsity, attn=sparsity, compensate="none")
    return _macs_kept(corp.apply(model, stats, corp.plan(model, stats, recipe)))


def _macs_kept(result: corp.Result) -> float:
    assert result.report.macs is not None  # images and texts are counted
    dense, pruned = result.report.macs
    return pruned / dense


class Pruner:
    """Prunes one model; all steps but merged tokens share one calibration, whose time counts for each."""

    def __init__(self, subject: Subject) -> None:
        self.subject, start = subject, time.perf_counter()
        self.stats = corp.calibrate(subject.model, subject.calibration)
        self.seconds = time.perf_counter() - start
        self.has_output = corp.find_sites(subject.model).output is not None

    def steps(self, wanted: Sequence[str]) -> list[str]:
        """The steps that this model can take: output heads are of language models, merged tokens of images."""
        idle = "+ merged tokens" if self.has_output or not self.subject.images else "+ output head"
        idle_too = () if self.has_output or self.subject.images else ("+ output head",)
        return [step for step in wanted if step not in (idle, *idle_too)]

    def prune(self, recipe: Recipe) -> tuple[corp.Result, float]:
        model, start = self.subject.model, time.perf_counter()
        known = None if recipe.tokens else self.stats
        result = corp.prune(model, self.subject.calibration, recipe, stats=known)
        return result, time.perf_counter() - start + (self.seconds if known else 0.0)


def row(pruner: Pruner, references: Sequence[Reference], recipe: Recipe) -> dict[str, Any]:
    """One step of the ladder: what it costs, how far its output is from the dense one, batch by batch, and how long."""
    subject = pruner.subject
    result, seconds = pruner.prune(recipe)
    return {
        "macs": _macs_kept(result),
        "seconds": seconds,
        "divergence": [one.compare(result.model).divergence().value for one in references],
        **subject.headline(result.model),
    }


def difference(row: dict[str, Any], before: dict[str, Any]) -> str:
    """Of the mean divergences, with the 95 % interval of the paired difference."""
    pairs = torch.tensor(row["divergence"]) - torch.tensor(before["divergence"])
    half = 1.96 * float(pairs.std()) / math.sqrt(len(pairs))
    return f"{float(pairs.mean()):+.3f} ± {half:.3f}"


def page(found: dict[str, Any]) -> str:
    """All rows as tables, one per model."""
    parts = []
    for name, rows in found.items():
        keys = [key for key in rows["dense"] if key not in ("divergence", "macs", "seconds")]
        table = [["dense", "1.000", "0", "", *(f"{rows['dense'][key]:.3g}" for key in keys), ""]]
        for budget, steps in rows.items():
            before = None
            for step, one in steps.items() if budget != "dense" else ():
                title = f"{budget} {step}"
                mean = sum(one["divergence"]) / len(one["divergence"])
                change = difference(one, before) if before else ""
                numbers = [f"{one[key]:.3g}" for key in keys]
                table.append([title, f"{one['macs']:.3f}", f"{mean:.3f}", change, *numbers, f"{one['seconds']:.0f}"])
                before = one
        columns = ("at the MACs of", "MACs", "divergence", "change (95 %)", *keys, "seconds")
        parts.append(f"## {name}\n\n{markdown_table(columns, table)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sparsities", nargs="*", type=float, default=SPARSITIES)
    parser.add_argument(
        "--macs", nargs="*", type=float, default=(0.75, 0.4), help="other budgets: first and last step only"
    )
    parser.add_argument("--samples", type=int, default=1000, help="that models are judged on")
    args = parser.parse_args()
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this benchmark needs real weights and data")
    warnings.simplefilter("ignore", CorpWarning)
    path = RESULTS / "beyond.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    for name in args.models:
        subject = MODELS[name](Path(assets), args.samples)
        references = [Reference(subject.model, [batch]) for batch in subject.judged]
        pruner, rows = Pruner(subject), found.setdefault(name, {})
        rows.setdefault("dense", subject.headline(subject.model))
        budgets = {f"{share:g} × dense,": (share, ENDS) for share in args.macs}
        for sparsity in args.sparsities:
            target = cost_of_paper(subject.model, pruner.stats, sparsity)
            budgets[f"{sparsity:.0%}"] = target, list(LADDER)
        for budget, (target, wanted) in budgets.items():
            for step in pruner.steps(wanted):
                steps = rows.setdefault(budget, {})
                if step not in steps:
                    steps[step] = row(pruner, references, LADDER[step](target))
                    write_text(path, json.dumps(found, indent=1) + "\n")
                    write_text(RESULTS / "beyond.md", page(found))
                    shown = {key: value for key, value in steps[step].items() if key != "divergence"}
                    print(name, budget, step, shown, flush=True)


if __name__ == "__main__":
    main()
