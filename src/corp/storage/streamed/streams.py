"""What a streamed run keeps on disk between blocks: hidden states, finished blocks, and their records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from corp.errors import StorageError
from corp.io.files import read_json, write_tensors, write_text
from corp.numerics.exact import Path as Elimination
from corp.steps.allocation.curves import Curve

DENSE, PRUNED = "dense", "pruned"  # streams of the walk that prunes
FIRST = "first"  # the dense stream of the walk before that


@dataclass(frozen=True)
class Store:
    """The folder of a run. A block is done when its record is there, which is written last."""

    folder: Path

    def write_stream(self, kind: str, block: int, index: int, hidden: Tensor) -> None:
        """Write the hidden states of one batch that enter the block with this number."""
        write_tensors(self._stream(kind, block, index), {"hidden": hidden.cpu().contiguous()})

    def read_stream(self, kind: str, block: int, index: int, device: torch.device) -> Tensor:
        path = self._stream(kind, block, index)
        try:
            return load_file(path)["hidden"].to(device, copy=True)
        except (SafetensorError, OSError, KeyError) as error:
            raise StorageError(f"{path} is not what a run leaves behind; fresh=True starts over") from error

    def finish(self, block: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Write a narrowed block and its record; the hidden states that entered it are no longer needed."""
        write_tensors(self.shard(block), tensors)
        write_text(self._record(block), json.dumps(record))
        self.forget(block, DENSE, PRUNED)

    def forget(self, block: int, *kinds: str) -> None:
        """Remove the hidden states of these kinds that entered this block or any before it."""
        for path in self.folder.glob("stream-*.safetensors"):
            _, number, kind, _ = path.name.split("-")
            if kind in kinds and int(number) <= block:
                path.unlink()

    def record(self, block: int) -> dict[str, Any] | None:
        """The record of a finished block; None if it is not finished."""
        if not self._record(block).is_file():
            return None
        raw = read_json(self._record(block))
        if not isinstance(raw, dict):
            raise StorageError(f"{self._record(block)} is not what a run leaves behind; fresh=True starts over")
        return raw

    def write_curves(self, block: int, curves: Mapping[str, Curve]) -> None:
        """Write the error curves of a block's sites; the hidden states that entered it are no longer needed."""
        tensors = {f"{name}/errors": curve.errors.cpu() for name, curve in curves.items()}
        for name, path in ((name, curve.path) for name, curve in curves.items() if curve.path is not None):
            tensors |= {f"{name}/order": path.order.cpu(), f"{name}/error": path.error.cpu()}
        write_tensors(self._curves(block).with_suffix(".safetensors"), tensors or {"": torch.zeros(0)})
        numbers = {name: [curve.energy, curve.path and curve.path.ridge] for name, curve in curves.items()}
        write_text(self._curves(block), json.dumps(numbers))
        self.forget(block, FIRST)

    def read_curves(self, block: int) -> dict[str, Curve] | None:
        """The curves of a block; None if they are not there yet."""
        if not self._curves(block).is_file():
            return None
        numbers, tensors = read_json(self._curves(block)), load_file(self._curves(block).with_suffix(".safetensors"))
        found = {}
        for name, (energy, ridge) in numbers.items():
            path = None if ridge is None else Elimination(tensors[f"{name}/order"], tensors[f"{name}/error"], ridge)
            found[name] = Curve(tensors[f"{name}/errors"], energy, path)
        return found

    def _curves(self, block: int) -> Path:
        return self.folder / f"curves-{block:04}.json"

    def shard(self, block: int) -> Path:
        return self.folder / f"block-{block:04}.safetensors"

    def _record(self, block: int) -> Path:
        return self.folder / f"block-{block:04}.json"

    def _stream(self, kind: str, block: int, index: int) -> Path:
        return self.folder / f"stream-{block:04}-{kind}-{index:06}.safetensors"
