"""Commands take dataclasses; the command line takes one option per field. This turns the one into the other."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from corp.cli.arguments import PANELS
from corp.cli.recipes import make_recipe, recipe_parameters
from corp.recipe import Recipe

Parameters = dict[str, inspect.Parameter]


def expanded(
    *, first: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace every parameter of a command that is a dataclass by the options of its fields.

    A parameter of the command's own with the name of a field replaces that field's option. Options in `first` stand
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
    """One parameter per field of a dataclass that has an option, those of nested dataclasses in their place."""
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
    """The dataclass out of the values of its options."""
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
