"""The torchvision repair acts only when needed (in fresh processes: operators are declared once per process)."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")


def run(code: str) -> str:
    code = f"import sys; import corp; import corp.adapters.torchvision_import as t; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_timm_imports_after_corp() -> None:
    assert run("import corp, timm; print(timm.is_model('deit_tiny_patch16_224'))") == "True"


def test_nothing_is_declared_when_the_extension_loads() -> None:
    assert run("t._loads = lambda p: True; print(t.make_importable())") == "False"


def test_nothing_is_declared_twice() -> None:
    assert run("t.make_importable(); print(t.make_importable())") == "False"


def test_nothing_is_declared_without_torchvision() -> None:
    assert run("t.find_spec = lambda n: None; print(t.make_importable())") == "False"


def test_importing_corp_imports_neither_torch_nor_torchvision() -> None:
    assert run("print([n for n in ('torch', 'torchvision', 'timm') if n in sys.modules])") == "[]"
