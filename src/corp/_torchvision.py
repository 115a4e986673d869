"""Let torchvision be imported where its compiled part does not match torch.

A torchvision built for CUDA beside a CPU-only torch cannot load its extension; its import then fails with
"operator torchvision::nms does not exist" and takes timm, and parts of transformers, down with it. Nothing
here needs those operators: declaring their schemas is enough for the import to pass. Calling them still fails.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a schema lives as long as its Library


def make_importable() -> bool:
    """Declare what is missing, only if torchvision is installed, not imported yet, and cannot load its extension."""
    if "torchvision" in sys.modules or _declared:
        return False
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)
    return True


def _loads(package: Path) -> bool:
    """Does torchvision's own extension load? It then declares the operators itself; declaring twice is an error."""
    for extension in (*package.glob("_C*.so"), *package.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
        return True
    return False
