"""The lines that reproduce a pruned model, from its recipe and the base model's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corp.planning.plan import Plan
from corp.recipe import PRESETS, Recipe


def remake(
    name: str, manifest: Mapping[str, Any], identity: Mapping[str, Any] | None, plan: Plan
) -> list[tuple[str, str]]:
    """("p", "code" or "note", text): the command if it is recorded, otherwise the lines of Python."""
    command, earlier = manifest.get("command"), manifest.get("earlier_plans")
    if isinstance(command, str) and command:
        return [("p", "The command that made it:"), ("code", command)]
    parts = [("p", "In Python:"), ("code", python_lines(name, identity, plan))]
    if isinstance(earlier, list) and earlier:
        parts.append(("note", f"The model had been pruned {len(earlier)} time(s) before; start from that one."))
    if plan.weights:
        parts.append(("note", f"The weights to start from have the fingerprint {plan.weights}."))
    return parts


def python_lines(name: str, identity: Mapping[str, Any] | None, plan: Plan) -> str:
    """The three-line program; `identity` is how timm builds the dense model, None for a user's own model."""
    preset = nearest_preset(plan.recipe)
    fields = [f"{key}={value!r}" for key, value in changed(plan.recipe, preset).items()]
    maker = {"best": "Recipe(", "paper": "Recipe.paper("}.get(preset, "Recipe.preset(")
    given = ", ".join(fields if preset in ("best", "paper") else [repr(preset), *fields])
    return "\n".join(
        [
            "import corp" if identity is None else "import corp, timm",
            "",
            f"model = {_creation(identity)}",
            f"result = corp.prune(model, batches, corp.{maker}{given}))  # batches: {plan.samples} samples",
            f"corp.save(result, {name!r})",
        ]
    )


def _creation(identity: Mapping[str, Any] | None) -> str:
    if identity is None:
        return "...  # the dense model, in eval mode"
    given = identity.get("args")
    args = f", **{given!r}" if isinstance(given, dict) and given else ""
    return f"timm.create_model({_full_name(identity)!r}, pretrained=True{args}).eval()"


def nearest_preset(recipe: Recipe) -> str:
    """The preset from which the fewest fields differ."""
    return min(PRESETS, key=lambda name: len(changed(recipe, name)))


def changed(recipe: Recipe, preset: str = "best") -> dict[str, Any]:
    """The fields of a recipe that differ from those of a preset."""
    default = Recipe.preset(preset).to_dict()
    return {key: value for key, value in recipe.to_dict().items() if value != default[key]}


def _full_name(identity: Mapping[str, Any]) -> str:
    tag = identity.get("tag")
    return f"{identity.get('architecture')}.{tag}" if tag else str(identity.get("architecture"))
