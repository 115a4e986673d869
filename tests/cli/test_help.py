"""What `--help` says, how fast it may be, and that its examples are commands."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field, fields
from typing import Annotated

import pytest
import typer

from corp.cli.arguments import DATA, FIRST, PANELS, option
from corp.cli.expand import build, expanded, flag
from corp.cli.main import COMMANDS, load_command
from corp.recipe import PRESETS, Recipe
from scripts.cli_page import PAGE, page
from tests.helpers.command import run

LIGHT = ("", "prune", "plan", "calibrate", "check", "merge", "export", "inspect")


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom corp.cli.main import app\n"
        f"for name in {LIGHT!r}:\n"
        "    try:\n        app([*name.split(), '--help'])\n    except SystemExit as end:\n        assert not end.code\n"
        "heavy = {'torch', 'numpy', 'timm', 'transformers', 'PIL'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(LIGHT)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name: str) -> None:
    shown = run(name, "--help")
    assert shown.exit_code == 0, shown.output
    assert "Examples:" in shown.output
    for line in COMMANDS[name].examples:
        program, command, *args = shlex.split(line)
        assert (program, command) == ("corp", name)
        load_command(name).make_context(name, args)


def test_an_example_with_an_unknown_option_would_be_found() -> None:
    with pytest.raises(Exception, match="sampled"):
        load_command("prune").make_context("prune", ["model", "-o", "out", "--sampled", "5"])


def test_the_ten_most_used_options_come_first_and_the_rest_in_panels() -> None:
    parameters = load_command("prune").params
    plain = [p.name for p in parameters if p.rich_help_panel is None and p.param_type_name == "option"]
    assert plain == list(FIRST)
    panels = [p.rich_help_panel for p in parameters if p.rich_help_panel]
    assert list(dict.fromkeys(panels)) == list(PANELS)
    output = run("prune", "--help").output
    places = [output.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)


def test_every_field_of_the_recipe_and_of_the_source_is_an_option_of_prune() -> None:
    spelled = {name for p in load_command("prune").params for name in p.opts}
    assert {flag(f.name) for f in fields(Recipe)} <= spelled
    assert {"--calib", "--text-field", "--seq-len", "--batch-size", "--dtype", "--sample-tokens"} <= spelled
    assert not {"--images", "--text", "--recipe", "--source"} & spelled


@pytest.mark.parametrize("preset", PRESETS)
def test_options_make_the_recipe_that_python_makes(preset: str) -> None:
    words = ["--preset", preset, "--mlp", "0.4", "--intercept", "yes", "--round-to", "mlp=4", "--equal-heads"]
    words += ["--skip", "a b*", "--skip", "'", "--override", "x:y:attn=0.1"]
    given = load_command("prune").make_context("prune", ["vit", "-o", "out", *words]).params
    odd = {"intercept": True, "round_to": {"mlp": 4}, "skip": ("a b*", "'"), "overrides": {"x:y": {"attn": 0.1}}}
    assert build(Recipe, given) == Recipe.preset(preset, mlp=0.4, equal_heads=True, **odd)


def test_values_are_checked_against_choices() -> None:
    for given in (("--dtype", "int3"), ("--rank", "best"), ("--preset", "worst")):
        refused = run("prune", "model", "-o", "out", *given)
        assert refused.exit_code == 2
        assert given[0] in refused.output


@dataclass(frozen=True)
class Inner:
    depth: Annotated[int, option("How deep.", DATA)] = 3


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, typer.Argument()]
    many: Annotated[list[str], option("Some.", DATA)] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)
    hidden: int = 7
    left: Annotated[int, option("Left out.", DATA)] = 1


def test_dataclasses_become_options_and_come_back_as_dataclasses() -> None:
    seen: list[object] = []

    def command(outer: Outer, depth: Annotated[int, option("Another default.", DATA)] = 5) -> None:
        seen.append((outer, depth))

    command.__annotations__ = {"outer": Outer, "depth": Annotated[int, option("Another default.", DATA)]}
    made = expanded(first=("many",), without=("left",))(command)
    signature = inspect.signature(made)
    assert list(signature.parameters) == ["name", "many", "depth"]
    assert signature.parameters["depth"].default == 5
    made(name="x", many=["a"], depth=9)
    assert seen == [(Outer("x", ["a"], Inner(9), 7, 1), 9)]


def test_the_reference_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.cli_page"


def test_completion_offers_commands_options_and_values() -> None:
    def offered(words: str, number: int) -> str:
        variables = {"_CORP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(number)}
        code = "from corp.cli.main import app; app(prog_name='corp')"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **variables}
        )
        return done.stdout

    assert "prune" in offered("corp pr", 1)
    assert "--sample-tokens" in offered("corp prune --sam", 2)
    assert offered("corp prune --preset p", 3).split() == ["paper"]
    assert set(offered("corp prune --device c", 3).split()) == {"cpu", "cuda"}
