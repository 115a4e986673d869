"""Write tests/golden/bits.json: the bits of statistics, plan and weights that a fixed model and batch come to here.

python -m scripts.bits --show    # without writing it
python -m scripts.bits    # after a change that is meant to change results; CHANGELOG.md says so in a line
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.errors import CorpWarning
from corp.recipe import Recipe
from scripts.golden import GOLDEN, digests, image_model, images, language_model, outputs, sums_of, tokens

BITS = GOLDEN / "bits.json"
RECIPES = {"paper": Recipe.paper(mlp=0.5, attn=0.5, vo=0.25), "best": Recipe(mlp=0.5, attn=0.5, vo=0.25)}


def reference() -> dict[str, str]:
    """What decides how sums are rounded: the same here and there, or bits cannot be compared."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines[:20] if line.startswith(("model", "stepping"))]
    return {
        "torch": torch.__version__,
        "processor": ", ".join(names) or platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def made() -> dict[str, Any]:
    """The bits of every step, in float32, as models are used."""
    text = [{"input_ids": tokens(seed, 16)} for seed in range(3)]
    cases: dict[str, tuple[nn.Module, list[Any], Tensor]] = {
        "image": (image_model().float(), [images(seed, 12).float() for seed in range(3)], images(9, 2).float()),
        "language": (language_model().float(), text, tokens(9, 2)),
    }
    found: dict[str, Any] = {}
    for name, (model, batches, probe) in cases.items():
        stats = corp.calibrate(model, batches)
        found[name] = {"statistics": _short(digests(sums_of(stats)))}
        for recipe, wanted in RECIPES.items():
            result = corp.prune(model, batches, wanted)
            sites = [site.to_dict() for site in result.plan.sites]
            found[name][recipe] = {
                "plan": _short(sites),
                "weights": _short(digests(dict(result.model.state_dict()))),
                "outputs": _short(outputs(result.model, probe)),
            }
    return found


def _short(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    warnings.simplefilter("ignore", CorpWarning)
    torch.set_num_threads(1)
    record = json.dumps({"reference": reference(), "made": made()}, indent=1) + "\n"
    if "--show" in sys.argv:
        sys.stdout.write(record)
    else:
        BITS.write_text(record, encoding="utf-8")
        sys.stdout.write(f"{BITS}\n")
