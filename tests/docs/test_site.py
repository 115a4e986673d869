"""The documentation is a site without broken links, pictures are up to date, and pages say what the code does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import corp
from corp.cli.main import COMMANDS, load_command
from corp.recipe import Recipe
from scripts.pictures import drawn, stale

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
COMMAND = re.compile(r"\bcorp ([a-z]+)((?:[^`\n]|\\\n)*)")


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


@pytest.mark.slow  # make test builds it too, by make docs
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert all(f'id="corp.api.{verb}"' in reference for verb in ("prune", "calibrate", "plan", "apply", "repair"))
    assert (tmp_path / "site" / "benchmarks" / "results" / "beyond.html").is_file()


def test_a_broken_link_or_a_page_outside_the_navigation_would_be_found(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[nothing](nothing.md)\n")
    (tmp_path / "docs" / "lost.md").write_text("# B\n")
    text = (ROOT / "mkdocs.yml").read_text().partition("validation:")[2].partition("nav:\n  - index.md")[0]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nnav: [index.md]\nvalidation:{text}")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nothing.md" in done.stderr
    assert "lost.md" in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


def test_pictures_are_up_to_date() -> None:
    assert stale() == [], "run python -m scripts.pictures"
    assert drawn("fold.svg").startswith("<svg")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_exist_with_their_options(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name, rest in COMMAND.findall(text):
        if name not in COMMANDS:
            continue
        known = {option for param in load_command(name).params for option in (*param.opts, *param.secondary_opts)}
        unknown = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", rest.partition("#")[0])) - known - {"--help"}
        assert not unknown, f"corp {name} has no {', '.join(sorted(unknown))}"


def test_fields_and_names_on_pages_exist() -> None:
    """`corp.name` is public or a module, and keyword arguments of Recipe(...) are its fields."""
    known = {f.name for f in fields(Recipe)}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for arguments in re.findall(r"Recipe(?:\.paper|\.preset)?\(([^()]*)\)", text):
            assert set(re.findall(r"\b([a-z_]+)=", arguments)) <= known, f"{page.name}: Recipe({arguments})"
        for name in re.findall(r"\bcorp\.([a-z_]+)\(", text):
            assert name in corp.__all__, f"{page.name}: corp.{name}"


def test_every_field_of_the_recipe_is_on_the_first_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert [f.name for f in fields(Recipe) if f"`{f.name}`" not in text] == ["sequential_samples"]


def test_the_lowest_versions_are_those_that_are_promised() -> None:
    promised = dict(re.findall(r'"([\w-]+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text().partition("docs = ")[0]))
    promised.pop("hatchling")
    text = (ROOT / "constraints-lowest.txt").read_text().partition("# Not promised")[0]
    lowest = dict(re.findall(r"^([\w-]+)==([\d.]+)$", text, re.MULTILINE))
    assert set(lowest) == set(promised)
    assert all((lowest[name] + ".").startswith(version + ".") for name, version in promised.items())
