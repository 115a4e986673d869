"""The public names, and that imports go one way: errors <- numerics <- stats <- plan <- adapters <- api <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import corp

SOURCE = Path(corp.__file__).parent
# Each part may import parts of a lower level, and its own.
LEVELS = {
    "errors": 0, "version": 0, "stages": 0, "_torchvision": 0, "text": 0,
    "asked": 1, "recipe": 2, "sites": 1, "numerics": 1, "atomic": 1, "batches": 1, "tying": 1,
    "stats": 2, "holdout": 2,
    "fitting": 3, "checkpoint": 3, "workers": 3, "offload": 3,
    "plan": 4, "surgery": 4,
    "widths": 3, "planning": 5, "folding": 6,
    "calibration": 5, "measure": 5, "adapters": 5, "report": 5, "data": 5, "evaluate": 5, "analysis": 5,
    "streams": 3, "anatomy": 4, "reading": 4, "turning": 3,
    "budget": 6, "latency": 7, "sharing": 8, "sequential": 8, "verifying": 7,
    "api": 9, "demo": 9,
    "export": 10, "sweeping": 10, "searching": 10, "checking": 10, "shift": 10,
    "storage": 11,
    "cli": 12, "__main__": 13,
}  # fmt: skip


def upward_arrows(part: str, code: str) -> list[str]:
    """The imports in `code`, a file of `part`, of parts that stand higher or beside it."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "corp":
            inner = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            inner = [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("corp.")]
        else:
            continue
        found += [name for name in inner if name != part and LEVELS[name] >= LEVELS[part]]
    return found


def files() -> list[tuple[str, Path]]:
    paths = [path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE]
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in sorted(paths)]


@pytest.mark.parametrize(("part", "path"), files(), ids=lambda value: str(getattr(value, "name", value)))
def test_imports_point_downwards(part: str, path: Path) -> None:
    assert upward_arrows(part, path.read_text()) == []


def test_the_layering_test_can_fail() -> None:
    assert upward_arrows("numerics", "from corp.api import prune") == ["api"]
    assert upward_arrows("stats", "def f():\n    import corp.surgery.linear") == ["surgery"]
    assert upward_arrows("plan", "from corp import storage") == ["storage"]
    assert upward_arrows("cli", "from corp.api import prune") == []


def test_numerics_imports_torch_and_errors_only() -> None:
    for path in (SOURCE / "numerics").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                allowed = (
                    "__future__",
                    "collections.abc",
                    "typing",
                    "functools",
                    "torch",
                    "corp.errors",
                    "corp.numerics",
                )
                assert node.module.startswith(allowed), f"{path.name}: {node.module}"


def test_only_adapters_data_and_demo_know_the_libraries() -> None:
    for part, path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] in ("timm", "transformers", "sklearn") for name in names):
                assert part in ("adapters", "demo"), f"{path} imports {names}"


def test_public_names() -> None:
    assert corp.__all__ == [
        "CorpError", "Recipe", "Result", "Statistics", "__version__", "apply", "calibrate", "find_sites", "load",
        "measure_shift", "plan", "prune", "register_adapter", "repair", "save",
    ]  # fmt: skip
    assert all(hasattr(corp, name) for name in corp.__all__)
    assert callable(corp.plan)  # the function, although a module of that name exists
