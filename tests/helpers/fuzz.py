"""Valid files, damaged a little, given to everything that parses: python -m tests.helpers.fuzz CASES [TARGET ...]

Only CorpError may come out. The process has little memory and little time per case, so that a header that lies about
sizes, or a loop without end, shows. What went wrong is printed as JSON, with the seed that shows it again.
"""

from __future__ import annotations

import copy
import faulthandler
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import corp
from corp import CorpError, Recipe, Statistics
from corp.adapters import hf_models, timm_models
from corp.calibration.settings import Settings
from corp.cli.report import read_part
from corp.data.dense import read_target
from corp.data.documents import in_order, open_documents
from corp.data.images import ImageBatches
from corp.data.labels import read_labels
from corp.data.sts import read_pairs
from corp.errors import CorpWarning
from corp.planning.plan import Plan
from corp.report.html import Run, page
from corp.surgery.apply import shrink
from tests.helpers import hf_folders
from tests.helpers.models import build, images
from tests.helpers.seeds import seed_all

MEMORY = 6 * 2**30  # of address space; torch alone takes half of it
SECONDS = 20  # per case
STRANGE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "../../../etc/passwd", "/etc/passwd", "blocks.0.mlp", "\x00", "\ud800", "a" * 5000, "<script>"),
    *([], {}, [[]], [None], {"": None}, [1, 2, 3]),
)


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bits flipped, ends cut off, pieces doubled, zeroed or put in."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        place, length = draw.randrange(len(raw) + 1), draw.randrange(1, 64)
        match draw.randrange(5):
            case 0 if place < len(raw):
                raw[place] ^= 1 << draw.randrange(8)
            case 1:
                del raw[place:]
            case 2:
                raw[place:place] = raw[place : place + length]
            case 3:
                raw[place : place + length] = bytes(len(raw[place : place + length]))
            case _:
                raw[place:place] = draw.randbytes(length)
    return bytes(raw)


def damaged_json(content: bytes, draw: random.Random) -> bytes:
    """A value replaced, an entry lost, doubled or renamed; sometimes plain damage to the bytes."""
    if draw.random() < 0.2:
        return damaged_bytes(content, draw)
    top = [json.loads(content)]
    for _ in range(draw.choice((1, 1, 2, 4))):
        _damage(top, draw)
    if draw.random() < 0.02:
        return b"[" * 100_000
    return json.dumps(top[0]).encode()


def _damage(top: list[Any], draw: random.Random) -> None:
    holder, key = _somewhere(top, draw)
    match draw.randrange(5):
        case 0 if holder is not top:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(("", "x", "name", str(key).upper()))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        case 3 if isinstance(holder[key], int | float) and abs(holder[key]) < 2**60:
            holder[key] = draw.choice((-holder[key], holder[key] + 1, holder[key] * 2**20, float(holder[key])))
        case _:
            holder[key] = copy.deepcopy(draw.choice(STRANGE))


def _somewhere(top: list[Any], draw: random.Random) -> tuple[Any, Any]:
    """Some container, at any depth, and one of its keys."""
    holder, key = top, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.75:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    return holder, key


def damaged_tensors(content: bytes, draw: random.Random) -> bytes:
    """A header that lies about shapes, types, offsets or its own length."""
    if draw.random() < 0.3:
        return damaged_bytes(content, draw)
    (length,) = struct.unpack("<Q", content[:8])
    header = damaged_json(content[8 : 8 + length], draw)
    if draw.random() < 0.3:  # offsets and shapes that agree with each other and not with the file
        parsed = json.loads(content[8 : 8 + length])
        name = draw.choice([key for key in parsed if key != "__metadata__"])
        huge = draw.choice((2**20, 2**32, 2**40, 2**62))
        parsed[name] = {"dtype": "F32", "shape": [huge], "data_offsets": [0, 4 * huge]}
        header = json.dumps(parsed).encode()
    told = len(header) if draw.random() < 0.9 else draw.choice((0, 2**20, 2**40, 2**63))
    return struct.pack("<Q", told) + header + content[8 + length :]


def damaged(path: Path, draw: random.Random) -> None:
    """Damage the file in the way of its kind."""
    ways = {".json": damaged_json, ".safetensors": damaged_tensors}
    path.write_bytes(ways.get(path.suffix, damaged_bytes)(path.read_bytes(), draw))


class Target(NamedTuple):
    """Something that parses: how its files are made, and what reads them."""

    make: Callable[[Path], None]
    read: Callable[[Path], Any]


def make_plan(folder: Path) -> None:
    model, data = build("vit"), images(8, 10)
    stats = corp.calibrate(model, data, settings=Settings(tokens="all"))
    recipe = Recipe.paper(
        mlp=0.5, attn=0.5, skip=("*.1.attn",), overrides={"*.0.mlp": {"mlp": 0.3}}, round_to={"mlp": 8}
    )
    corp.plan(model, stats, recipe).save(folder / "plan.json")


def read_plan(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    str(plan)
    model = build("vit")
    shrink(model, corp.find_sites(model), plan)


def make_statistics(folder: Path) -> None:
    corp.calibrate(build("vit"), images(8, 10)).save(folder / "stats")
    _without_fingerprints(folder / "stats")


def _without_fingerprints(folder: Path) -> None:
    """Files as strangers may write them; damage of one with a fingerprint would not get past that."""
    for path in folder.rglob("*.safetensors"):
        save_file(load_file(path), path)


def read_statistics(folder: Path) -> None:
    stats = Statistics.load(folder / "stats")
    model = build("vit")
    corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5)))


def _llama() -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    seed_all(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)).eval()


def make_rotary_statistics(folder: Path) -> None:
    ids = [{"input_ids": torch.randint(32, (4, 12))} for _ in range(12)]
    corp.calibrate(_llama(), ids).save(folder / "stats")
    _without_fingerprints(folder / "stats")


def read_rotary_statistics(folder: Path) -> None:
    corp.plan(_llama(), Statistics.load(folder / "stats"), Recipe.paper(mlp=0.5, attn=0.5))


def _stream(stop: int) -> Iterator[Any]:
    for number, batch in enumerate(images(8, 10)):
        if number == stop:
            raise KeyboardInterrupt
        yield batch


def make_checkpoint(folder: Path) -> None:
    """What a run that was killed in its last batch leaves."""
    with suppress(KeyboardInterrupt):
        corp.calibrate(build("vit"), _stream(7), out=folder / "stats", settings=Settings(checkpoint_seconds=0))
    _without_fingerprints(folder)


def read_checkpoint(folder: Path) -> None:
    corp.calibrate(build("vit"), _stream(8), out=folder / "stats", settings=Settings(checkpoint_seconds=1000))


def make_hf_saved(folder: Path) -> None:
    model = hf_models.create(str(hf_folders.opt(folder / "dense")))
    ids = [{"input_ids": torch.randint(4, 24, (4, 16)), "attention_mask": torch.ones(4, 16)} for _ in range(12)]
    corp.save(corp.prune(model, ids, Recipe.paper(mlp=0.5, attn=0.5)), folder / "saved")
    shutil.rmtree(folder / "dense")


def make_timm_saved(folder: Path) -> None:
    import timm

    seed_all(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=2).eval()
    batch = [torch.randn(8, 3, 32, 32) for _ in range(3)]
    corp.save(corp.prune(model, batch, Recipe.paper(mlp=0.9, attn=0.5)), folder / "saved")


def read_saved(folder: Path) -> None:
    corp.load(folder / "saved")
    read_part(folder / "saved")


def read_report(folder: Path) -> None:
    part = read_part(folder / "saved")
    assert isinstance(part, Run)
    page([part])


def make_sweep(folder: Path) -> None:
    row = {"samples": 9, "mlp": 0.3, "attn": 0.3, "preset": "paper", "rank": "combined", "compensate": "full"}
    rows = [{**row, "ridge": 1e-3, "mlp": s, "top1": 0.5 + s, "mlp error": None} for s in (0.1, 0.3, 0.5)]
    content = {"format": "corp-sweep", "model": "m", "dense": {"params": 9, "macs": 9}, "rows": rows}
    (folder / "sweep.json").write_text(json.dumps(content))


def read_sweep(folder: Path) -> None:
    part = read_part(folder / "sweep.json")
    page([], [part])  # type: ignore[list-item]


def make_weights(folder: Path) -> None:
    import timm

    seed_all(0)
    state = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=2).state_dict()
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "weights.pth")


def read_weights(folder: Path) -> None:
    for file in ("weights.safetensors", "weights.pth"):
        timm_models.read_state(folder / file)


def make_hf_folder(folder: Path) -> None:
    hf_folders.opt(folder / "opt")


def read_hf_folder(folder: Path) -> None:
    hf_models.create(str(folder / "opt"))
    hf_models.tokenizer(str(folder / "opt"))


def make_images(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    for number, suffix in enumerate(("png", "jpg", "webp", "bmp", "tiff", "gif", "ppm")):
        Image.fromarray(pixels).save(folder / f"{number}.{suffix}")


def read_images(folder: Path) -> None:
    def transform(image: Image.Image) -> torch.Tensor:
        return torch.tensor(np.array(image.resize((8, 8)))).float()

    for _ in ImageBatches(sorted(folder.iterdir()), transform, max_bad=1.0):
        pass


def make_texts(folder: Path) -> None:
    texts = hf_folders.sentences(20)
    (folder / "a.txt").write_text("\n".join(texts))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text, "n": 1}) for text in texts))
    (folder / "c.csv").write_text("n,text\n" + "\n".join(f'1,"{text}"' for text in texts))
    (folder / "d.tsv").write_text("n\ttext\n" + "\n".join(f"1\t{text}" for text in texts))


def read_texts(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        for text, _ in in_order(open_documents([path], field="text", lines=True, piece=100)):
            text.encode()


def make_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": hf_folders.sentences(50)}), folder / "a.parquet", row_group_size=20)


def make_tables(folder: Path) -> None:
    (folder / "photos").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (2, 2)).save(folder / "photos" / f"{name}.bmp")
    (folder / "labels.csv").write_text("file,label\na.bmp,1\nb.bmp,0\n")
    (folder / "pairs.tsv").write_text("score\tsentence1\tsentence2\n4.5\ta cat\ta dog\n0.1\tone\ttwo\n")
    np.save(folder / "depth.npy", np.ones((4, 5)))


def read_tables(folder: Path) -> None:
    read_labels(folder / "labels.csv", [folder / "photos"])
    read_pairs(folder / "pairs.tsv")
    read_target(folder / "depth.npy")


TARGETS = {
    "plan": Target(make_plan, read_plan),
    "statistics": Target(make_statistics, read_statistics),
    "rotary statistics": Target(make_rotary_statistics, read_rotary_statistics),
    "checkpoint": Target(make_checkpoint, read_checkpoint),
    "saved transformers model": Target(make_hf_saved, read_saved),
    "saved timm model": Target(make_timm_saved, read_saved),
    "report": Target(make_hf_saved, read_report),
    "sweep": Target(make_sweep, read_sweep),
    "weights": Target(make_weights, read_weights),
    "transformers folder": Target(make_hf_folder, read_hf_folder),
    "images": Target(make_images, read_images),
    "texts": Target(make_texts, read_texts),
    **({"parquet": Target(make_parquet, read_texts)} if find_spec("pyarrow") else {}),
    "tables": Target(make_tables, read_tables),
}


class Slow(Exception):  # noqa: N818  (not an error of the code under test)
    """A case took too long."""


def case(target: Target, valid: Path, place: Path, seed: str) -> str:
    """Damage one file of a copy and read it: "accepted", "refused", or what else happened."""
    draw = random.Random(seed)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(valid, place)
    files = sorted(path for path in place.rglob("*") if path.is_file() and not path.name.startswith(".lock"))
    victim = draw.choice([path for path in files if path.suffix not in (".html", ".md", ".bmp") or len(files) == 1])
    damaged(victim, draw)
    try:
        target.read(place)
    except CorpError:
        return "refused"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {str(error)[:200]} at {Path(where.filename).name}:{where.lineno}"
        return f"{victim.relative_to(place)}: {text}"
    return "accepted"


def main(cases: int, names: list[str], first: int = 0) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    faulthandler.enable()
    warnings.simplefilter("ignore", CorpWarning)
    torch.set_num_threads(1)

    def slow(_signal: int, _frame: object) -> None:
        raise Slow(f"more than {SECONDS} seconds")

    signal.signal(signal.SIGALRM, slow)
    broken = 0
    with tempfile.TemporaryDirectory(prefix="corp-fuzz-") as folder, torch.random.fork_rng():
        for name in names or TARGETS:
            start, counts = time.monotonic(), {"accepted": 0, "refused": 0, "broken": 0}
            valid = Path(folder, name, "valid")
            valid.mkdir(parents=True)
            TARGETS[name].make(valid)
            shutil.copytree(valid, Path(folder, name, "undamaged"))
            TARGETS[name].read(Path(folder, name, "undamaged"))  # else a refusal would say nothing
            for number in range(first, first + cases):
                signal.alarm(SECONDS)
                outcome = case(TARGETS[name], valid, Path(folder, name, "case"), f"{name} {number}")
                signal.alarm(0)
                if outcome not in counts:
                    print(json.dumps({"target": name, "case": number, "broken": outcome}), flush=True)
                    outcome = "broken"
                counts[outcome] += 1
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            took = round(time.monotonic() - start, 1)
            print(json.dumps({"target": name, "cases": cases, **counts, "seconds": took, "peak MB": peak}), flush=True)
            broken += counts["broken"]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="backslashreplace")
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
