"""The notebook runs from top to bottom; its cells are run here without a kernel."""

from __future__ import annotations

import ast
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from corp.errors import CorpWarning
from tests.helpers import few_digits

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def run_cell(code: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line, which a notebook would show."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)  # type: ignore[attr-defined]


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    few_digits.use(monkeypatch)
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CorpWarning)
        shown = [run_cell(code, names) for code in cells]
    tables = [value for value in shown if hasattr(value, "_repr_html_")]
    assert len(tables) == 3  # the result, its plan, and the comparison show themselves as tables
    assert names["pruned"] > names["dense"] - 0.02
    assert shown[-1] is True


def test_the_notebook_is_kept_without_outputs() -> None:
    content = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell["outputs"] for cell in content["cells"] if cell["cell_type"] == "code")
