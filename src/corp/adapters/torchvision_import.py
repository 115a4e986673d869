"""Make torchvision importable if its compiled part does not match torch.

A torchvision built for CUDA beside a CPU-only torch cannot load its extension; its import then fails with
"operator torchvision::nms does not exist", and so does that of timm and of parts of transformers. Nothing
here needs those operators: declaring their schemas is enough for the import to succeed. Calling them still fails.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a schema lives as long as its Library


class _Watcher(MetaPathFinder):
    """An import finder that finds nothing: for torchvision, it declares missing operators, and others import it."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            make_importable()


def watch() -> None:
    """Declare the missing operators when torchvision is first imported; until then nothing heavy is loaded."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def make_importable() -> bool:
    """Declare missing operators, only if torchvision is installed, not imported yet, and cannot load its extension."""
    if "torchvision" in sys.modules or _declared:
        return False
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return False
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _declared.append(library)
    return True


def _loads(package: Path) -> bool:
    """Whether torchvision's own extension loads. It then declares the operators; declaring them twice is an error."""
    import torch

    for extension in (*package.glob("_C*.so"), *package.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
        return True
    return False
