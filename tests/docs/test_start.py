"""Every command of the start pages runs as it is printed, on tiny models under the names that the pages use."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from corp.adapters import torchvision_import
from corp.errors import CorpWarning
from tests.helpers import decoders, few_digits, hf_folders, small_timm
from tests.helpers.command import run
from tests.helpers.ports import free_port
from tests.helpers.seeds import seeded

PAGES = Path(__file__).parents[2] / "docs" / "start"
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block of a page, and the comment above it: "not run: reason", "file: name", or nothing."""

    mark: str
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return [Block(m["mark"] or "", m["language"], m["code"]) for m in BLOCK.finditer(text)]


def walk(page: str, stand_ins: dict[str, str]) -> list[str]:
    """Run all blocks of a page in the working directory and return what its bash commands printed."""
    names: dict[str, Any] = {}
    printed = []
    for mark, language, code in blocks(page):
        for name, tiny in stand_ins.items():
            code = code.replace(name, tiny)
        if mark.startswith("file: "):
            Path(mark.removeprefix("file: ")).write_text(code, encoding="utf-8")
        elif language == "python":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", (CorpWarning, ResourceWarning))
                exec(compile(code, page, "exec"), names)
        elif not mark.startswith("not run: "):
            printed.append(shell(code))
    return printed


def shell(code: str) -> str:
    """Run lines of bash: corp's commands in this process, which spares their imports, all others by bash."""
    if all(line.startswith("corp ") for line in code.splitlines()):
        return "".join(corp_command(line) for line in code.splitlines())
    return bash(code)


def corp_command(line: str) -> str:
    done = run(*shlex.split(line)[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}"
    return done.output


def bash(code: str) -> str:
    """Run bash in a process group of its own, which ends with the block: servers do not outlive the test."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A torchvision that does not fit torch would stop transformers; corp does this on import, servers do without corp.
    Path("site").mkdir(exist_ok=True)
    Path("site", "sitecustomize.py").write_text(
        f"import runpy; runpy.run_path({torchvision_import.__file__!r})['watch']()"
    )
    with tempfile.TemporaryFile("w+") as output:  # not a pipe, which a server in the background would keep open
        process = subprocess.Popen(
            ["bash", "-c", f"set -e\n{code}"],
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PATH": path, "PYTHONPATH": str(Path("site").resolve())},
        )
        try:
            returned = process.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        assert returned == 0, code
        return output.read()


def photos(folder: Path, count: int) -> None:
    folder.mkdir()
    draw = seeded(count)
    for number in range(count):
        pixels = torch.randint(0, 256, (20, 20, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number:02}.png")


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_image_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_digits.use(monkeypatch)
    few_digits.cut(monkeypatch)
    save_file(timm.create_model(small_timm.NAME, pretrained=False).state_dict(), tmp_path / "deit.safetensors")
    photos(tmp_path / "photos", 64)
    photos(tmp_path / "test-photos", 8)
    printed = walk("vision.md", {"deit_tiny_patch16_224": small_timm.NAME, "8000": free_port()})
    assert set(json.loads(printed[-1])) == {"class"}
    assert {"small", "small-onnx", "digits-60"} <= {path.name for path in tmp_path.iterdir()}


def test_the_language_page(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="GGUF files are written with the package gguf")
    decoders.build("llama").save_pretrained(tmp_path / "SmolLM2-135M")
    decoders.tokenizer().save_pretrained(tmp_path / "SmolLM2-135M")
    hf_folders.texts(tmp_path / "texts.jsonl")
    (tmp_path / "held-out.txt").write_text("\n".join(hf_folders.sentences(30, 20, seed=1)))
    printed = walk("language.md", {"8000": free_port()})
    assert json.loads(printed[-1])["text"].startswith("the cat sat on")


@pytest.mark.parametrize("page", ["vision.md", "language.md"])
def test_only_installing_is_left_out(page: str) -> None:
    found = blocks(page)
    left_out = [block for block in found if block.mark.startswith("not run")]
    assert len(found) > 6
    assert all(block.code.startswith("pip install") for block in left_out)
    assert {block.language for block in found} == {"bash", "python"}


def test_a_command_that_fails_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no-such-model"):
        shell("corp inspect no-such-model")
    with pytest.raises(AssertionError):
        shell("false")
