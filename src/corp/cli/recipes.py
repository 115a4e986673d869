"""The options that make a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from corp.errors import RecipeError
from corp.recipe import PRESETS, RANKINGS, Recipe

Mlp = Annotated[float | None, typer.Option(help="Share of MLP hidden channels to remove, 0 <= s < 1.")]
Attn = Annotated[float | None, typer.Option(help="Share of every head's Q/K dimensions to remove, 0 <= s < 1.")]
Vo = Annotated[float | None, typer.Option(help="Share of every head's value dimensions to remove, 0 <= s < 1.")]
EqualHeads = Annotated[
    bool, typer.Option("--equal-heads", help="Make values as wide as queries and keys: fused kernels, smaller caches.")
]
VoBasis = Annotated[
    str, typer.Option(help="subspace: turn every head's values first; coordinates: keep dimensions as they are.")
]
TargetMacs = Annotated[
    float | None, typer.Option(help="Instead of shares: at most this share of the dense multiply-accumulates.")
]
TargetParams = Annotated[
    float | None, typer.Option(help="Instead of shares: at most this share of the dense parameters.")
]
TargetLatency = Annotated[
    float | None,
    typer.Option(help="Instead of shares: at most this share of the dense time per sample, measured here."),
]
MinAgreement = Annotated[
    float | None,
    typer.Option(help="Instead of a target: as small as agreement with the dense model on held-out data stays this."),
]
Sparsity = Annotated[float | None, typer.Option(help="The same share for --mlp and --attn.")]
Preset = Annotated[str, typer.Option(help=f"Sets what is not given: {', '.join(PRESETS)}.")]
Rank = Annotated[str, typer.Option(help=f"MLP ranking: {', '.join(RANKINGS)}.", show_default="the preset's")]
Compensate = Annotated[str, typer.Option(help="full, mean (bias only) or none.", show_default="the preset's")]
Intercept = Annotated[
    str,
    typer.Option(
        help="May compensation use a bias? auto (where there is one), yes or no.", show_default="the preset's"
    ),
]
Ridge = Annotated[
    str,
    typer.Option(
        help="Ridge, relative to the mean diagonal of the system; auto: what held-out batches say.",
        show_default="the preset's",
    ),
]
AttnBasis = Annotated[
    str,
    typer.Option(
        help="coordinates: keep Q/K dimensions; subspace: keep the best combinations of them.",
        show_default="the preset's",
    ),
]
Allocate = Annotated[
    str,
    typer.Option(
        help="What a target does: uniform shares, or worth: shared out by what the next channel is worth.",
        show_default="the preset's",
    ),
]
Sequential = Annotated[
    bool | None,
    typer.Option(
        "--sequential/--no-sequential",
        help="Fit block after block, so that later layers make up for earlier ones; reads --calib again.",
        show_default="the preset's",
    ),
]
SequentialSamples = Annotated[
    int | None,
    typer.Option(
        help="Samples whose hidden states --sequential holds.", min=1, show_default="256, fewer if they are long"
    ),
]
RoundTo = Annotated[
    str, typer.Option(help="Round kept widths up: a number, e.g. mlp=64,head=8, or fast, which is that.")
]
Skip = Annotated[list[str] | None, typer.Option(help="Glob over site names to leave alone; may be repeated.")]
Override = Annotated[
    list[str] | None,
    typer.Option(
        help="Other sparsities, e.g. 'blocks.0.*:mlp=0.2,attn=0'; under a target also ranges, mlp=0-0.3; repeatable."
    ),
]

_INTERCEPTS: dict[str, bool | str] = {"": "", "auto": "auto", "yes": True, "no": False}


def make_recipe(
    mlp: float | None,
    attn: float | None,
    vo: float | None,
    equal_heads: bool,
    target_macs: float | None,
    target_params: float | None,
    sparsity: float | None,
    preset: str,
    rank: str,
    compensate: str,
    intercept: str,
    ridge: str,
    attn_basis: str,
    allocate: str,
    vo_basis: str,
    round_to: str,
    skip: list[str] | None,
    override: list[str] | None,
    min_agreement: float | None = None,
    target_latency: float | None = None,
    sequential: bool | None = None,
    sequential_samples: int | None = None,
) -> Recipe:
    if sparsity is not None and (mlp is not None or attn is not None):
        raise RecipeError("--sparsity sets both --mlp and --attn; give either it or those")
    targets = target_macs, target_params, target_latency, min_agreement
    if all(share is None for share in (sparsity, mlp, attn, vo, *targets)):
        raise RecipeError("nothing to prune: give --sparsity 0.5, some of --mlp, --attn and --vo, or --target-macs 0.6")
    if intercept not in _INTERCEPTS:
        raise RecipeError(f"--intercept {intercept} is not one of {', '.join(filter(None, _INTERCEPTS))}")
    both = 0.0 if sparsity is None else sparsity
    return Recipe(
        mlp=both if mlp is None else mlp,
        attn=both if attn is None else attn,
        vo=vo or 0.0,
        equal_heads=equal_heads,
        target_macs=target_macs,
        target_params=target_params,
        target_latency=target_latency,
        min_agreement=min_agreement,
        preset=preset,
        rank=rank,
        compensate=compensate,
        intercept=_INTERCEPTS[intercept],
        ridge=ridge if ridge in ("", "auto") else parse_number(ridge, float, "--ridge"),
        attn_basis=attn_basis,
        allocate=allocate,
        vo_basis=vo_basis,
        sequential="" if sequential is None else sequential,
        sequential_samples=sequential_samples,
        round_to=_rounding(round_to),
        skip=tuple(skip or ()),
        overrides=dict(_override(text) for text in override or ()),
    )


def _rounding(text: str) -> Any:
    if text == "fast":
        return text
    return _pairs(text, int, "--round-to") if "=" in text else parse_number(text, int, "--round-to")


def _override(text: str) -> tuple[str, dict[str, Any]]:
    glob, colon, changes = text.rpartition(":")
    if not colon or not glob:
        raise RecipeError(f"--override {text!r} should look like 'blocks.0.*:mlp=0.2,attn=0'")
    return glob, _pairs(changes, _number_or_range, "--override")


def _number_or_range(text: str) -> Any:
    """0.3, or 0-0.3; the number is tried first, because 1e-3 is one."""
    try:
        return float(text)
    except ValueError:
        low, dash, high = text.partition("-")
        if not dash:
            raise
        return float(low), float(high)


def _pairs(text: str, kind: Callable[[str], Any], option: str) -> dict[str, Any]:
    pairs = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise RecipeError(f"{option}: {part!r} should look like name=number")
        pairs[key.strip()] = parse_number(value, kind, option)
    return pairs


def parse_number(text: str, kind: Callable[[str], Any], option: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise RecipeError(f"{option}: {text!r} is not a number") from None
