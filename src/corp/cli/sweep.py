"""corp sweep: one calibration, many plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from corp import api
from corp.cli import options as o
from corp.cli.console import command, progress, show_json, show_table
from corp.errors import RecipeError
from corp.evaluate.classify import compare
from corp.recipe import KINDS, Recipe
from corp.stats import Statistics


@command
def sweep(
    model: o.ModelArg,
    stats: Annotated[Path, typer.Option(help="Folder of statistics (corp calibrate).")],
    sparsity: Annotated[str, typer.Option(help="first:last:step, or a list: 0.3,0.5,0.7.")] = "0.1:0.7:0.1",
    kinds: Annotated[str, typer.Option(help="What to prune: mlp, attn, both; several with commas.")] = "both",
    compensate: Annotated[str, typer.Option(help="full, mean, none; several with commas.")] = "full",
    rank: Annotated[str, typer.Option(help="Rankings; several with commas.")] = "combined",
    ridge: o.Ridge = 1e-3,
    data: Annotated[list[Path] | None, typer.Option(help="Images to evaluate on, against the dense model.")] = None,
    samples: o.Samples = 1000,
    weights: o.Weights = None,
    batch_size: o.BatchSize = 32,
    device: o.Device = "auto",
    dtype: o.Dtype = "float32",
    seed: o.Seed = 0,
    json: o.Json = False,
) -> None:
    """Apply many recipes to MODEL from one set of statistics; with --data, measure what each does to the outputs."""
    recipes = _recipes(parse_range(sparsity), kinds.split(","), compensate.split(","), rank.split(","), ridge)
    dense = o.place(o.load_model(model, weights), device, dtype)
    statistics = Statistics.load(stats)
    batches = o.image_batches(dense, data, samples, seed, batch_size) if data else None
    rows = []
    with progress("sweeping", len(recipes), "recipes") as advance:
        for recipe in recipes:
            rows.append(_row(dense, statistics, recipe, batches))
            advance(1)
    if json:
        show_json(rows)
        return
    columns = list(rows[0])
    show_table("sweep", columns, [[_cell(row[column]) for column in columns] for row in rows])


def _recipes(shares: list[float], kinds: list[str], how: list[str], ranks: list[str], ridge: float) -> list[Recipe]:
    unknown = set(kinds) - {*KINDS, "both"}
    if unknown:
        raise RecipeError(f"--kinds: {', '.join(sorted(unknown))} is not among {', '.join((*KINDS, 'both'))}")
    recipes = []
    for kind in kinds:
        wanted = {"mlp": kind in ("mlp", "both"), "attn": kind in ("attn", "both")}
        for r, c, s in ((r, c, s) for r in ranks for c in how for s in shares):
            recipes.append(Recipe(mlp=s * wanted["mlp"], attn=s * wanted["attn"], compensate=c, rank=r, ridge=ridge))
    return recipes


def _row(dense: nn.Module, stats: Statistics, recipe: Recipe, batches: Any) -> dict[str, Any]:
    plan = api.plan(dense, stats, recipe)
    result = api.apply(dense, stats, plan)
    errors = {kind: [s.relative_error for s in plan.sites if s.kind == kind] for kind in KINDS}
    row: dict[str, Any] = {"mlp": recipe.mlp, "attn": recipe.attn, "rank": recipe.rank, "compensate": recipe.compensate}
    row |= {"params": result.report.params[1], "macs": result.report.macs[1] if result.report.macs else None}
    row |= {f"{kind} error": sum(e) / len(e) if e else None for kind, e in errors.items()}
    if batches is not None:
        score = compare(dense, [result.model], batches)[0]
        row |= {"agreement": score.agreement, "kl": score.kl}
    return row


def parse_range(text: str) -> list[float]:
    """Parse "0.1:0.7:0.1" (both ends included) or "0.3,0.5"."""
    try:
        if ":" not in text:
            return [float(part) for part in text.split(",")]
        first, last, step = (float(part) for part in text.split(":"))
        if step <= 0 or last < first:
            raise ValueError
        return [round(first + i * step, 9) for i in range(int((last - first) / step + 1e-9) + 1)]
    except ValueError:
        raise RecipeError(f"--sparsity {text!r} should look like 0.1:0.7:0.1 or 0.3,0.5") from None


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
