"""Files from strangers: no code of theirs runs, no path of theirs leaves its folder, no name of theirs is markup."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import corp
from corp import CorpError, Recipe, Statistics
from corp.adapters import hf_models, timm_models
from corp.cli.console import printable
from corp.cli.main import app
from corp.data.dense import read_target
from corp.data.images import ImageBatches
from tests.helpers import hf_folders
from tests.helpers.models import build, images


class Payload:
    """Unpickled, it makes a file: what an attacker's would do is worse."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code was run"


# Pickles.


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_code_in_a_checkpoint_is_not_run(legacy: bool, tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save({"model": Payload(marker)}, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CorpError, match="no pickle is run"):
        timm_models.read_state(path)
    command = ["prune", "deit_tiny_patch16_224", "--weights", str(path), "--calib", str(tmp_path), "--mlp", "0.5"]
    told = CliRunner().invoke(app, [*command, "-o", str(tmp_path / "out")])
    assert told.exit_code == 1
    assert "no pickle is run" in told.output
    assert not marker.exists()
    with path.open("rb") as file:  # the payload is one: whoever unpickles it runs it
        torch.load(file, weights_only=False)
    assert marker.exists()


def test_pickles_under_other_names_are_not_run(tmp_path: Path, marker: Path) -> None:
    raw = pickle.dumps(Payload(marker))
    for name in ("a.npy", "weights.safetensors", "weights.bin"):
        (tmp_path / name).write_bytes(raw)
    np.save(tmp_path / "object.npy", np.array([[Payload(marker)]], dtype=object), allow_pickle=True)
    for read, name in (
        (read_target, "a.npy"),
        (read_target, "object.npy"),
        (timm_models.read_state, "weights.safetensors"),
        (timm_models.read_state, "weights.bin"),
    ):
        with pytest.raises(CorpError):
            read(tmp_path / name)
    assert not marker.exists()


def test_pickled_weights_in_a_transformers_folder_are_not_read(tmp_path: Path, marker: Path) -> None:
    folder = hf_folders.opt(tmp_path / "opt")
    (folder / "model.safetensors").unlink()
    torch.save({"x": Payload(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(CorpError, match="pickle"):
        hf_models.create(str(folder))
    assert not marker.exists()


# Code beside weights.

CODE = "import os\nos.mkdir({marker!r})\nfrom transformers import {base} as Evil\n"


@pytest.mark.parametrize("what", ["config", "model", "tokenizer", "processor"])
def test_code_in_a_transformers_folder_is_not_run(what: str, tmp_path: Path, marker: Path) -> None:
    folder = hf_folders.opt(tmp_path / "m") if what != "processor" else hf_folders.vit(tmp_path / "m")
    (folder / "evil.py").write_text(CODE.format(marker=str(marker), base="OPTConfig"))
    file, auto = {
        "config": ("config.json", "AutoConfig"),
        "model": ("config.json", "AutoModelForCausalLM"),
        "tokenizer": ("tokenizer_config.json", "AutoTokenizer"),
        "processor": ("preprocessor_config.json", "AutoImageProcessor"),
    }[what]
    content = json.loads((folder / file).read_text())
    content["auto_map"] = {auto: ["evil.Evil", "evil.Evil"] if what == "tokenizer" else "evil.Evil"}
    if what == "config":
        content["model_type"] = "evil"
    if what == "processor":
        content["image_processor_type"] = "EvilProcessor"
    (folder / file).write_text(json.dumps(content))
    for load in (hf_models.create, hf_models.tokenizer, hf_models.preprocessing):
        try:
            load(str(folder))
        except CorpError:
            continue
    assert not marker.exists()


def test_a_saved_models_config_cannot_name_code(tmp_path: Path, marker: Path) -> None:
    model = hf_models.create(str(hf_folders.opt(tmp_path / "opt")))
    ids = [{"input_ids": torch.randint(4, 24, (4, 16)), "attention_mask": torch.ones(4, 16)} for _ in range(12)]
    corp.save(corp.prune(model, ids, Recipe.paper(mlp=0.5)), tmp_path / "saved")
    (tmp_path / "saved" / "evil.py").write_text(CODE.format(marker=str(marker), base="OPTForCausalLM"))
    manifest = json.loads((tmp_path / "saved" / "corp.json").read_text())
    for name in ("evil.Evil", "AutoModel", "pipeline", "os", "../evil"):
        manifest["base"]["identity"]["class"] = name
        manifest["base"]["identity"]["config"]["auto_map"] = {"AutoModelForCausalLM": "evil.Evil"}
        (tmp_path / "saved" / "corp.json").write_text(json.dumps(manifest))
        with pytest.raises(CorpError):
            corp.load(tmp_path / "saved")
    assert not marker.exists()


# Paths.


@pytest.fixture
def stats(tmp_path: Path) -> Path:
    corp.calibrate(build("vit"), images()).save(tmp_path / "stats")
    return tmp_path / "stats"


def read_all(folder: Path) -> None:
    for sums in Statistics.load(folder).sums.values():
        sums.tensors()


@pytest.mark.parametrize(
    "path", ["../outside.safetensors", "{tmp}/outside.safetensors", "sub/../../outside.safetensors"]
)
def test_a_manifest_cannot_point_out_of_its_folder(path: str, stats: Path, tmp_path: Path) -> None:
    manifest = json.loads((stats / "statistics.json").read_text())
    entry = manifest["sites"]["blocks.0.mlp"]
    shutil.copyfile(stats / entry["file"], tmp_path / "outside.safetensors")  # it would fit
    entry["file"] = path.format(tmp=tmp_path)
    (stats / "statistics.json").write_text(json.dumps(manifest))
    with pytest.raises(CorpError, match="impossible values"):
        read_all(stats)


@pytest.mark.parametrize("name", ["statistics.json", "site-0000.safetensors"])
def test_links_out_of_a_statistics_folder_are_not_followed(name: str, stats: Path, tmp_path: Path) -> None:
    (stats / name).rename(tmp_path / "outside")
    (stats / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CorpError, match="link that leaves its folder"):
        read_all(stats)


@pytest.mark.parametrize("name", ["corp.json", "plan.json", "model.safetensors"])
def test_links_out_of_a_model_folder_are_not_followed(name: str, tmp_path: Path) -> None:
    import timm

    model = timm.create_model("test_vit", img_size=32, num_classes=2).eval()
    corp.save(
        corp.prune(model, [torch.randn(8, 3, 32, 32)], Recipe.paper(mlp=0.9, compensate="none")), tmp_path / "saved"
    )
    (tmp_path / "saved" / name).rename(tmp_path / "outside")
    (tmp_path / "saved" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CorpError, match="link that leaves its folder"):
        corp.load(tmp_path / "saved")


def test_an_output_that_is_a_link_is_left_alone(stats: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(CorpError, match="does not replace it"):
        Statistics.load(stats).save(tmp_path / "link", overwrite=True)
    assert (tmp_path / "precious" / "file").read_text() == "mine"


# Lies about sizes.

MEASURED = """
import resource, sys
from pathlib import Path
import corp
from corp.data.images import ImageBatches
from corp.data.dense import read_target
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    if sys.argv[1].endswith("png"):
        list(ImageBatches([Path(sys.argv[1])], lambda image: image, max_bad=1.0))
    else:
        read_target(Path(sys.argv[1]))
except corp.CorpError as error:
    print("refused", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)
"""


def _png(width: int, height: int) -> bytes:
    """A few bytes that claim to be a large image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_headers_that_lie_allocate_nothing(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(_png(13_000, 13_000))  # below what Pillow refuses by itself
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (30000, 30000)}".ljust(117) + "\n"
    (tmp_path / "bomb.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    for name in ("bomb.png", "bomb.npy"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MEASURED, str(tmp_path / name)],
            capture_output=True,
            text=True,
            check=True,
        )
        said, megabytes = done.stdout.split()
        assert said == "refused"
        assert int(megabytes) < 100


def test_an_image_of_too_many_pixels_is_named(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(_png(30_000, 5_000))
    with pytest.raises(CorpError, match="pixels"):
        list(ImageBatches([tmp_path / "bomb.png"], lambda image: torch.zeros(1)))


# Names.


def test_names_cannot_command_the_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\x9b2J") == "a\\x1b]0;title\\x07b\\x9b2J"
    assert printable("undecodable \udcff") == "undecodable \\udcff"
    assert printable("naïve 日本\tfile\n") == "naïve 日本\tfile\n"


def test_a_hostile_file_name_is_shown_spelled_out(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "x\x1b[2Jy")])
    assert told.exit_code != 0
    assert "\x1b[2J" not in told.output


def test_a_downloaded_model_is_taken_from_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How large its weights are, only the hub's library knows; so its config is not compared with them."""
    stored = tmp_path / "models--someone--opt"
    hf_folders.opt(stored / "snapshots" / "abc")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wanted = hf_models.create(str(stored / "snapshots" / "abc")).state_dict()
    found = hf_models.create("someone/opt").state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
