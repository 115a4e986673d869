"""The public names, and that imports go one way along one list of packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import corp

SOURCE = Path(corp.__file__).parent
# A package may import those before it, and itself.
ORDER = [
    "errors", "io", "recipe", "sites", "numerics", "calibration", "planning", "surgery", "measure", "adapters", "steps",
    "api", "data", "evaluate", "report", "storage", "testing", "cli", "__main__",
]  # fmt: skip


def imported(code: str) -> Iterator[tuple[str, ...]]:
    """Every module of corp that `code` imports, as its path below corp."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "corp":
            inside = (node.module or "").split(".")[1:]
            for alias in node.names:
                yield (*inside, alias.name)
        elif isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("corp."))


def upward_arrows(part: str, code: str) -> list[str]:
    """The imports in `code`, a file of `part`, of parts that come after it in the list."""
    parts = [path[0] for path in imported(code) if path != ("__version__",)]
    return [name for name in parts if ORDER.index(name) > ORDER.index(part)]


def files() -> list[tuple[str, Path]]:
    paths = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in sorted(paths)]


@pytest.mark.parametrize(("part", "path"), files(), ids=lambda value: str(getattr(value, "name", value)))
def test_imports_point_downwards(part: str, path: Path) -> None:
    assert upward_arrows(part, path.read_text()) == []


def test_the_layering_test_can_fail() -> None:
    assert upward_arrows("numerics", "from corp.api import prune") == ["api"]
    assert upward_arrows("calibration", "def f():\n    import corp.surgery.linear") == ["surgery"]
    assert upward_arrows("planning", "from corp import storage") == ["storage"]
    assert upward_arrows("cli", "from corp.api import prune") == []


def arrows_inside(package: Path) -> dict[str, set[str]]:
    """Which modules and packages inside of a package each of them imports."""
    inside = package.relative_to(SOURCE).parts
    depth = len(inside)
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        part = path.relative_to(package).parts[0].removesuffix(".py")
        targets = {p[depth] for p in imported(path.read_text()) if p[:depth] == inside and len(p) > depth}
        found.setdefault(part, set()).update(targets - {part})
    return {part: targets & set(found) for part, targets in found.items()}


def cycle_in(arrows: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", sorted(path.parent for path in SOURCE.glob("*/**/__init__.py")), ids=str)
def test_no_package_has_a_cycle(package: Path) -> None:
    assert cycle_in(arrows_inside(package)) == []


def test_the_cycle_test_can_fail() -> None:
    assert cycle_in({"a": {"b"}, "b": {"a"}})


def test_every_package_says_what_comes_in_and_goes_out_and_who_imports_it() -> None:
    for path in SOURCE.glob("*/**/__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert "import" in text, path
        assert text.count(".") >= 2, path


def test_the_architecture_can_be_seen_from_the_folder() -> None:
    assert len([path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]) <= 20


def files_in_the_walks(text: str) -> list[str]:
    """The files that a page names in backticks, as paths below corp or as bare names."""
    return re.findall(r"`([\w/]+\.py)`", text)


def test_the_walks_name_files_that_exist() -> None:
    known = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    known |= {path.rpartition("/")[2] for path in known}
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [name for name in files_in_the_walks(page) if not name.startswith("tests/")]
    assert len(named) > 40
    assert set(named) <= known


def test_the_page_lists_every_package() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert re.findall(r"`(\w+)`", "".join(rows)) == [part for part in ORDER if part != "__main__"]


def test_numerics_imports_torch_numpy_and_errors_only() -> None:
    python = ("__future__", "collections.abc", "typing", "functools", "math")
    allowed = (*python, "torch", "numpy", "corp.errors", "corp.numerics")
    for path in (SOURCE / "numerics").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.startswith(allowed), f"{path.name}: {name}"


def test_only_adapters_and_data_know_the_libraries() -> None:
    for part, path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in ("timm", "transformers", "sklearn") for name in names):
                assert part in ("adapters", "data"), f"{path} imports {names}"


def imports_of_tests(code: str) -> list[str]:
    """The modules of tests/, other than helpers, that `code` imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.split(".")[0] == "tests" and name.split(".")[1:2] != ["helpers"]]


def test_no_test_imports_another() -> None:
    for path in Path(__file__).parent.rglob("*.py"):
        assert imports_of_tests(path.read_text()) == [], path


def test_the_test_of_tests_can_fail() -> None:
    for code in ("from tests.contract import test_hf", "from tests import test_api", "import tests.cli.test_cli as t"):
        assert imports_of_tests(code)
    assert imports_of_tests("from tests.helpers import models\nimport tests.helpers.fuzz\nimport torch") == []


def test_public_names() -> None:
    assert sorted(corp.__all__) == [
        "CorpError", "Observer", "Plan", "Recipe", "Result", "Settings", "Statistics", "__version__", "apply",
        "calibrate", "find_sites", "load", "measure_shift", "plan", "prune", "prune_streamed",
        "register_adapter", "repair", "save",
    ]  # fmt: skip
    assert all(hasattr(corp, name) for name in corp.__all__)
