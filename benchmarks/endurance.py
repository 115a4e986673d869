"""Does a process that prunes all day grow, and does a folder of very many files start promptly?

    python -m benchmarks.endurance [--cycles 300] [--files 100000]

A cycle calibrates, plans, applies, saves, loads and evaluates the built-in model. Writes results/endurance.*.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import resource
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import corp
from corp import Recipe
from corp.data import digits
from corp.data.images import ImageBatches, choose, list_images
from corp.errors import CorpWarning
from corp.io.tables import markdown_table

RESULTS = Path(__file__).parent / "results"
WARM_UP = 20  # cycles before the first reading: caches fill, the allocator settles


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def reading(model: nn.Module) -> dict[str, int]:
    """What a leak would show in."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return {
        "resident memory, KB": resident // 1024,
        "open files": len(list(Path("/proc/self/fd").iterdir())),
        "hooks on the dense model": hooks(model),
        "Python objects": len(gc.get_objects()),
    }


def cycle(model: nn.Module, data: Any, folder: Path) -> float:
    result = corp.prune(model, data.calibration_images[:256].split(64), Recipe.paper(mlp=0.5, attn=0.5))
    corp.save(result, folder / "model", overwrite=True)
    loaded = corp.load(folder / "model", base=model)
    with torch.no_grad():
        return float((loaded(data.test_images[:100]).argmax(1) == data.test_labels[:100]).double().mean())


def endure(cycles: int) -> list[dict[str, Any]]:
    model, data = digits.load_model(), digits.load_split()
    rows = []
    with tempfile.TemporaryDirectory(prefix="corp-endurance-") as folder:
        for number in range(1, WARM_UP + cycles + 1):
            accuracy = cycle(model, data, Path(folder))
            done = number - WARM_UP
            if done >= 0 and done % max(1, cycles // 5) == 0:
                rows.append({"cycles": done, **reading(model), "accuracy": accuracy})
                print(rows[-1], flush=True)
    return rows


def many_files(count: int) -> dict[str, Any]:
    """From the folder to the first batch of 32 of 128 images, drawn from `count` files."""
    with tempfile.TemporaryDirectory(prefix="corp-files-") as folder:
        picture = io.BytesIO()
        Image.new("RGB", (8, 8)).save(picture, "bmp")
        for number in range(count):
            place = Path(folder, f"{number // 1000:03}")
            if number % 1000 == 0:
                place.mkdir()
            (place / f"{number:06}.bmp").write_bytes(picture.getvalue())
        start = time.perf_counter()
        found = list_images([folder])
        listed = time.perf_counter()
        batches = ImageBatches(choose(found, 128, 0), lambda _image: torch.zeros(3, 8, 8))
        batches.fingerprint()
        next(iter(batches))
        return {"files": len(found), "listing, s": listed - start, "to the first batch, s": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=300)
    parser.add_argument("--files", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CorpWarning)
    files = many_files(args.files)
    print(files, flush=True)
    rows = endure(args.cycles)
    content = {"cycles": rows, "files": files, "torch": torch.__version__, "corp": corp.__version__}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "endurance.json").write_text(json.dumps(content, indent=1) + "\n")
    table = markdown_table(list(rows[0]), [[f"{value:,}" for value in row.values()] for row in rows])
    listing = ", ".join(f"{key} {value:,.2f}" if "," in key else f"{value:,} {key}" for key, value in files.items())
    (RESULTS / "endurance.md").write_text(f"{table}\n\nA folder of {listing}.\n")


if __name__ == "__main__":
    main()
