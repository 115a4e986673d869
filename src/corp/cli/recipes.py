"""The options that make a recipe, read off the fields of `corp.Recipe`, where each is spelled once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, Literal

import typer

from corp.errors import RecipeError
from corp.recipe import BUDGET, HOW, PRESETS, REMOVE, Recipe

YES_NO = {"auto": "auto", "yes": True, "no": False}
_RENAMED = {"overrides": "override"}  # an option that is repeated is spelled in the singular


def recipe_parameters() -> dict[str, inspect.Parameter]:
    """The options of all recipe fields, --sparsity and --preset; None unless given, so that a preset can decide."""
    options = {
        "sparsity": _option(
            float | None, "Share to remove of MLP channels and of query and key dimensions alike.", REMOVE
        ),
        **{_RENAMED.get(f.name, f.name): _annotation(f) for f in fields(Recipe)},
        "merge_tokens": _option(
            bool | None,
            "Merge tokens of a vision transformer too, under a target of operations, time or agreement: --tokens auto.",
            BUDGET,
            (),
            "--merge-tokens",
        ),
        "preset": _option(
            str,
            "Settings to start from: best, the paper's, or a baseline's. Options given beside it win.",
            HOW,
            tuple(PRESETS),
        ),
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    return {
        name: inspect.Parameter(name, kind, default="best" if name == "preset" else None, annotation=annotation)
        for name, annotation in options.items()
    }


def make_recipe(
    *, sparsity: float | None, preset: str, override: list[str] | None, merge_tokens: bool | None = None, **given: Any
) -> Recipe:
    """The recipe of a preset with what was given on the command line."""
    if sparsity is not None and (given["mlp"] is not None or given["attn"] is not None):
        raise RecipeError("--sparsity sets both --mlp and --attn; give either it or those")
    settings = {name: value for name, value in given.items() if value is not None and value != []}
    if merge_tokens:
        settings["tokens"] = "auto"
    if sparsity is not None:
        settings |= {"mlp": sparsity, "attn": sparsity}
    for name, parse in _PARSED.items():
        if name in settings:
            settings[name] = parse(settings[name])
    if override:
        settings["overrides"] = dict(_override(text) for text in override)
    recipe = Recipe.preset(preset, **settings)
    parts = recipe.mlp, recipe.attn, recipe.vo, recipe.output, recipe.tokens, recipe.overrides
    if not recipe.has_target and not any(parts):
        raise RecipeError("nothing to prune: give --sparsity 0.5, some of --mlp, --attn and --vo, or --target-macs 0.6")
    return recipe


def flag(name: str) -> str:
    """How a recipe field is spelled on the command line."""
    return "--" + _RENAMED.get(name, name).replace("_", "-")


def _annotation(f: Field[Any]) -> Any:
    """The option of one field; its value is None unless it is given, so that a preset can fill it in."""
    default = "" if f.default is MISSING or not f.default else str(f.default)
    kind: Any = {"skip": list[str], "overrides": list[str], "equal_heads": bool, "sequential": bool}.get(f.name)
    if kind is None:
        kind = {"float": float, "float | None": float, "int | None": int}.get(str(f.type), str)
    shown = {"show_default": default} if default else {}
    switch = (f"{flag(f.name)}/--no-{f.name.replace('_', '-')}",) if kind is bool else ()
    return _option(kind | None, f.metadata["help"], f.metadata["panel"], f.metadata["choices"], *switch, **shown)


def _option(kind: Any, text: str, panel: str, choices: tuple[str, ...] = (), *spelled: str, **extra: Any) -> Any:
    if choices and not spelled:
        kind = Literal[choices] | None if kind == str | None else Literal[choices]
    return Annotated[kind, typer.Option(*spelled, help=text, rich_help_panel=panel, **extra)]


def _rounding(text: str) -> Any:
    if "=" in text:
        return _pairs(text, int, "--round-to")
    return int(text) if text.isdigit() else text


def _schedule(text: str) -> Any:
    """What --tokens gives: auto, or a number per block with commas."""
    return text if text == "auto" else tuple(parse_number(part, int, "--tokens") for part in text.split(","))


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


_PARSED: Mapping[str, Callable[[Any], Any]] = {
    "intercept": YES_NO.__getitem__,
    "round_to": _rounding,
    "tokens": _schedule,
}
