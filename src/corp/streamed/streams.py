"""What a streamed run keeps on disk between blocks: hidden states, finished blocks, and what they say of themselves."""

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
from corp.files import read_json, write_tensors, write_text

DENSE, PRUNED = "dense", "pruned"


@dataclass(frozen=True)
class Store:
    """The folder of a run. A block is done when its record is there, which is written last."""

    folder: Path

    def write_stream(self, kind: str, block: int, index: int, hidden: Tensor) -> None:
        """Hidden states of one batch that go into the block with this number."""
        write_tensors(self._stream(kind, block, index), {"hidden": hidden.cpu().contiguous()})

    def read_stream(self, kind: str, block: int, index: int, device: torch.device) -> Tensor:
        path = self._stream(kind, block, index)
        try:
            return load_file(path)["hidden"].to(device, copy=True)
        except (SafetensorError, OSError, KeyError) as error:
            raise StorageError(f"{path} is not what a run leaves behind; fresh=True starts over") from error

    def finish(self, block: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """A narrowed block and its record; the hidden states that went into it are not needed any more."""
        write_tensors(self.shard(block), tensors)
        write_text(self._record(block), json.dumps(record))
        self.forget(block)

    def forget(self, block: int) -> None:
        """Remove the hidden states of this block and of all before."""
        for path in self.folder.glob("stream-*.safetensors"):
            if int(path.name.split("-")[1]) <= block:
                path.unlink()

    def record(self, block: int) -> dict[str, Any] | None:
        """What a finished block says of itself; None if it is not finished."""
        if not self._record(block).is_file():
            return None
        raw = read_json(self._record(block))
        if not isinstance(raw, dict):
            raise StorageError(f"{self._record(block)} is not what a run leaves behind; fresh=True starts over")
        return raw

    def shard(self, block: int) -> Path:
        return self.folder / f"block-{block:04}.safetensors"

    def _record(self, block: int) -> Path:
        return self.folder / f"block-{block:04}.json"

    def _stream(self, kind: str, block: int, index: int) -> Path:
        return self.folder / f"stream-{block:04}-{kind}-{index:06}.safetensors"
