"""Turns dataclass parameters of commands into command-line options, one per field.

The options of `corp.Recipe` are made from its fields, too: None unless given, so that a preset can decide.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from corp.cli.arguments import PANELS, option, parse_number
from corp.errors import RecipeError
from corp.recipe import BUDGET, HOW, PRESETS, REMOVE, Recipe
from corp.recipe.checks import checked_sparsity

Parameters = dict[str, inspect.Parameter]
YES_NO = {"auto": "auto", "yes": True, "no": False}
_RENAMED = {"overrides": "override"}  # a repeatable option has a singular name


def expanded(
    *, first: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace every parameter of a command that is a dataclass by the options of its fields.

    A parameter of the command with the name of a field replaces that field's option. Options in `first` are listed
    above all panels, in that order; fields in `without` keep their default and are not offered.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
        own = {
            name: p.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in inspect.signature(function).parameters.items()
            if name not in groups
        }
        options: Parameters = {}
        for group in groups.values():
            options |= {name: p for name, p in parameters_of(group).items() if name not in without}
        options |= own

        @functools.wraps(function)
        def wrapped(**given: Any) -> None:
            built = {name: build(group, given) for name, group in groups.items()}
            function(**built, **{name: given[name] for name in own})

        parameters = ordered(options, first)
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return decorate


def parameters_of(group: type) -> Parameters:
    """One parameter per field of a dataclass that has an option, including those of nested dataclasses."""
    if group is Recipe:
        return recipe_parameters()
    found: Parameters = {}
    hints = get_type_hints(group, include_extras=True)
    for f in fields(group):
        hint = hints[f.name]
        if is_dataclass(hint):
            found |= parameters_of(hint)  # type: ignore[arg-type]
        elif _info(hint) is not None:
            default = _default(f)
            found[f.name] = inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    return found


def build(group: Any, given: Mapping[str, Any]) -> Any:
    """The dataclass, built from the values of its options."""
    if group is Recipe:
        return make_recipe(**{name: given[name] for name in recipe_parameters()})
    hints = get_type_hints(group, include_extras=True)
    values = {}
    for f in fields(group):
        if is_dataclass(hints[f.name]):
            values[f.name] = build(hints[f.name], given)
        elif f.name in given and _info(hints[f.name]) is not None:
            values[f.name] = given[f.name]
    return group(**values)


def ordered(options: Parameters, first: Collection[str]) -> list[inspect.Parameter]:
    """Arguments, then the options in `first` without a panel, then panel by panel."""
    top = [options[name].replace(annotation=_unpanelled(options[name].annotation)) for name in first if name in options]
    rest = [p for name, p in options.items() if name not in first]
    return sorted([*top, *rest], key=lambda p: _rank(p.annotation))


def _rank(annotation: Any) -> int:
    info = _info(annotation)
    if isinstance(info, ArgumentInfo):
        return -2
    panel = getattr(info, "rich_help_panel", None)
    return PANELS.index(panel) if panel in PANELS else -1


def _unpanelled(annotation: Any) -> Any:
    kind, info = get_args(annotation)
    plain = copy.copy(info)
    plain.rich_help_panel = None
    return Annotated[kind, plain]


def _info(annotation: Any) -> ArgumentInfo | OptionInfo | None:
    return next((part for part in get_args(annotation) if isinstance(part, ArgumentInfo | OptionInfo)), None)


def _default(f: Field[Any]) -> Any:
    if f.default_factory is not MISSING:
        return f.default_factory()
    return inspect.Parameter.empty if f.default is MISSING else f.default


def recipe_parameters() -> dict[str, inspect.Parameter]:
    """The options of all recipe fields, --sparsity and --preset; None unless given, so that a preset can decide."""
    merging = (
        "Merge tokens of a vision transformer too, under a target of operations, time or agreement: --tokens auto."
    )
    start = "Settings to start from: best, the paper's, or a baseline's. Other options override them."
    share = "Share to remove of MLP channels and of query and key dimensions alike."
    options: dict[str, Any] = {
        "sparsity": Annotated[float | None, option(share, REMOVE)],
        **{_RENAMED.get(f.name, f.name): _annotation(f) for f in fields(Recipe)},
        "merge_tokens": Annotated[bool | None, option(merging, BUDGET, "--merge-tokens")],
        "preset": Annotated[Literal[tuple(PRESETS)], option(start, HOW)],
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
        raise RecipeError("--sparsity sets both --mlp and --attn; give either --sparsity or those two")
    settings = {name: value for name, value in given.items() if value is not None and value != []}
    if merge_tokens:
        settings["tokens"] = "auto"
    if sparsity is not None:
        checked_sparsity("sparsity", sparsity)
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
    """The name of a recipe field on the command line."""
    return "--" + _RENAMED.get(name, name).replace("_", "-")


def _annotation(f: Field[Any]) -> Any:
    """The option of one field; its value is None unless given, so that a preset can set it."""
    default = "" if f.default is MISSING or not f.default else str(f.default)
    kind: Any = {"skip": list[str], "overrides": list[str], "equal_heads": bool, "sequential": bool}.get(f.name)
    if f.metadata["choices"] and kind is None:
        kind = Literal[f.metadata["choices"]]
    elif kind is None:
        kind = {"float": float, "float | None": float, "int | None": int}.get(str(f.type), str)
    shown = {"show_default": default} if default else {}
    switch = (f"{flag(f.name)}/--no-{f.name.replace('_', '-')}",) if kind is bool else ()
    return Annotated[kind | None, option(f.metadata["help"], f.metadata["panel"], *switch, **shown)]


def _rounding(text: str) -> Any:
    if "=" in text:
        return _pairs(text, int, "--round-to")
    return int(text) if text.isdigit() else text


def _schedule(text: str) -> Any:
    """The value of --tokens: auto, or one number per block, separated by commas."""
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


_PARSED: Mapping[str, Callable[[Any], Any]] = {
    "intercept": YES_NO.__getitem__,
    "round_to": _rounding,
    "tokens": _schedule,
}
