"""The examples run as they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
OF_ASSETS = [path for path in EXAMPLES if "CORP_ASSETS" in path.read_text()]


def run(path: Path, folder: Path, assets: str) -> None:
    environment = {**os.environ, "CORP_ASSETS": assets}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, cwd=folder, timeout=900, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path, tmp_path: Path) -> None:
    run(path, tmp_path, assets="")


@pytest.mark.real
@pytest.mark.parametrize("path", OF_ASSETS, ids=lambda path: path.name)
def test_example_runs_on_real_weights(path: Path, tmp_path: Path, assets: Path) -> None:
    run(path, tmp_path, assets=str(assets))
