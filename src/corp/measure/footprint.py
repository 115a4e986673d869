"""The size of a model: bytes of its weights on disk and in memory, and the peak of a forward pass."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from corp.io.files import tensor_header
from corp.measure.cost import count_macs, count_params


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: `weights` in memory, `activations` at the peak of a forward pass in addition."""

    params: int
    macs: int
    disk: int
    weights: int
    activations: int

    def to_dict(self) -> dict[str, Any]:
        memory = {"weights": self.weights, "activations": self.activations}
        return {"params": self.params, "macs": self.macs, "disk_bytes": self.disk, "memory_bytes": memory}


def measure_sizes(model: nn.Module, sample: Any, call: Callable[[], object]) -> Sizes:
    """MACs of one `sample` (a batch of 1), and memory of `call`, a forward pass over a batch of any size."""
    macs, peak = count_macs(model, sample), peak_bytes(call, next(model.parameters()).device)
    return Sizes(count_params(model), macs, disk_bytes(model), weight_bytes(model), peak)


def disk_bytes(model: nn.Module) -> int:
    """The size of model.safetensors as corp writes it, tensors and header, computed without writing it."""
    state: dict[str, Tensor] = model.state_dict()
    _, header = tensor_header({name: (tensor.dtype, tensor.shape) for name, tensor in state.items()})
    return sum(tensor.nbytes for tensor in state.values()) + len(header)


def weight_bytes(model: nn.Module) -> int:
    """Parameters and buffers in memory, shared ones once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that torch's allocator held at once during `call`, above what it held before.

    It counts tensors, including intermediate ones, and is reproducible. It does not include memory that libraries
    (oneDNN, cuDNN) allocate themselves, or that the allocator holds in reserve; peak RSS would mix those with the
    history of the process.
    """
    call()  # the first call builds persistent caches
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    return _profiled_peak(call)


def _profiled_peak(call: Callable[[], object]) -> int:
    """The peak of the running total of all allocations (+) and releases (-) that torch's profiler saw."""
    with _native_silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    total = peak = 0
    for _, change in sorted(_allocations(seen)):
        total += change
        peak = max(peak, total)
    return peak


def _allocations(seen: profile) -> list[tuple[float, int]]:
    """(time, bytes) of every allocation, from the exported trace: the profiler's only public view of them."""
    with tempfile.TemporaryDirectory() as folder, _native_silence():
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]


def resident_bytes(device: torch.device, *, peak: bool = False) -> int:
    """The memory that this process holds now, or its peak; on a GPU, what torch holds there. 0 if unknown."""
    if device.type == "cuda":
        return int((torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated)(device))
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    found = re.search(rf"Vm{'HWM' if peak else 'RSS'}:\s+(\d+) kB", status.read_text())
    return int(found[1]) * 1024 if found else 0


@contextmanager
def _native_silence() -> Iterator[None]:
    """Silence the profiler's C++ code, which writes to stderr directly and ignores its own log level."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
