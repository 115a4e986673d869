"""Models of strangers that ask for too much: python -m tests.helpers.hostile prints, as JSON, what became of each.

In a process of its own, whose memory can be read: every case says whether it was refused, and what it had allocated.
"""

from __future__ import annotations

import json
import resource
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corp
from corp import CorpError, Statistics
from corp.adapters import hf_models
from corp.errors import CorpWarning
from corp.evaluate.heads import load_head
from corp.planning.plan import Plan
from corp.surgery.apply import shrink
from tests.helpers import hf_folders
from tests.helpers.fuzz import make_hf_saved, make_plan, make_statistics
from tests.helpers.models import build

GIGABYTE = 2**30


def edit(path: Path, *keys: Any, value: Any) -> None:
    """Replace one value of a JSON file."""
    content = json.loads(path.read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    assert keys[-1] in place if isinstance(place, dict) else True
    place[keys[-1]] = value
    path.write_text(json.dumps(content))


def config_asks(key: str, value: int) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        edit(hf_folders.opt(folder / "m") / "config.json", key, value=value)
        hf_models.create(str(folder / "m"))

    return attack


def large_file(name: str, load: Callable[[str], Any]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        with (hf_folders.vit(folder / "m") / name).open("a+b") as file:
            file.truncate(GIGABYTE)
        load(str(folder / "m"))

    return attack


def compact_asks(key: str, value: int) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        make_hf_saved(folder)
        edit(folder / "saved" / "corp.json", "base", "identity", "config", key, value=value)
        corp.load(folder / "saved")

    return attack


def large_manifest(folder: Path) -> None:
    make_hf_saved(folder)
    with (folder / "saved" / "corp.json").open("a+b") as file:
        file.truncate(GIGABYTE)
    corp.load(folder / "saved")


def head_claims(folder: Path) -> None:
    claim = {"weight": {"dtype": "F32", "shape": [2**31, 2**20], "data_offsets": [0, 2**53]}}
    header = json.dumps(claim).encode()
    (folder / "head.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    load_head(folder / "head.safetensors")


def statistics_claim(folder: Path) -> None:
    make_statistics(folder)
    path = folder / "stats" / "statistics.json"
    text = path.read_text()
    path.write_text(text.replace("96", str(2**24)))
    for sums in Statistics.load(folder / "stats").sums.values():
        sums.tensors()


def plan_keeps(folder: Path) -> None:
    make_plan(folder)
    edit(folder / "plan.json", "sites", 0, "width", value=2**40)
    model = build("vit")
    shrink(model, corp.find_sites(model), Plan.load(folder / "plan.json"))


ATTACKS: dict[str, Callable[[Path], None]] = {
    "config: a vocabulary of 2^28": config_asks("vocab_size", 2**28),
    "config: an MLP of 2^28 channels": config_asks("ffn_dim", 2**28),
    "config: 2^30 positions": config_asks("max_position_embeddings", 2**30),
    "config: 10^6 layers": config_asks("num_hidden_layers", 10**6),
    "config.json of a gigabyte": large_file("config.json", hf_models.create),
    "tokenizer.json of a gigabyte": large_file("tokenizer.json", hf_models.tokenizer),
    "vocab.txt of a gigabyte": large_file("vocab.txt", hf_models.tokenizer),
    "preprocessor_config.json of a gigabyte": large_file("preprocessor_config.json", hf_models.preprocessing),
    "compact folder: a vocabulary of 2^28": compact_asks("vocab_size", 2**28),
    "compact folder: an MLP of 2^28 channels": compact_asks("ffn_dim", 2**28),
    "compact folder: a manifest of a gigabyte": large_manifest,
    "head: a header that claims 2^53 bytes": head_claims,
    "statistics: widths of 2^24": statistics_claim,
    "plan: a width of 2^40": plan_keeps,
}


def main() -> None:
    warnings.simplefilter("ignore", CorpWarning)
    for name, attack in ATTACKS.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with tempfile.TemporaryDirectory(prefix="corp-hostile-") as folder:
            try:
                attack(Path(folder))
                outcome = "accepted"
            except CorpError as error:
                outcome = str(error).replace(folder, "")
            except Exception as error:
                outcome = f"BROKEN {error!r}"[:300]
            shutil.rmtree(folder)
            Path(folder).mkdir()
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        print(json.dumps({"attack": name, "outcome": outcome, "MB": grown}), flush=True)


if __name__ == "__main__":
    main()
