"""The examples run as they stand, in this process, which spares their imports."""

import runpy
import warnings
from pathlib import Path

import pytest

from tests.helpers import few_digits

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
OF_ASSETS = [path for path in EXAMPLES if "CORP_ASSETS" in path.read_text()]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("corp.adapters.registry._registered", {})


def run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(path), run_name="__main__")
    assert "parameters" in capsys.readouterr().out


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CORP_ASSETS", "")
    few_digits.use(monkeypatch)
    run(path, capsys)


@pytest.mark.real
@pytest.mark.parametrize("path", OF_ASSETS, ids=lambda path: path.name)
def test_example_runs_on_real_weights(
    path: Path, assets: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CORP_ASSETS", str(assets))
    run(path, capsys)
