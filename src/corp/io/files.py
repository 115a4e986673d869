"""Atomic outputs, which are written under another name and then renamed, and size limits for reading small files.

Locks use flock directly, because they lock the folder that is being written; filelock locks only files.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows has no flock; there two runs into one folder are not detected
    fcntl = None  # type: ignore[assignment]

from corp.errors import StorageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_JSON_BYTES = 256 * 2**20  # far above any plan; an untrusted file may be of any size
DTYPE_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's, safetensors' own
DTYPE_NAMES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
DTYPE_NAMES |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within this context, a failure to write becomes a corp error that names `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # a library that writes into a folder may find the disk full, too
        raise StorageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, never sees half of it."""
    with writing(path):
        _sweep_up(path)
        handle, beside = tempfile.mkstemp(dir=path.parent, prefix=_prefix(path))
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                _hold(file.fileno())
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(beside, 0o666 & ~_umask())
                os.replace(beside, path)
        finally:
            Path(beside).unlink(missing_ok=True)  # it exists only if something went wrong


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file in the same way, one entry per line."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file into a folder that is not published yet."""
    from safetensors.torch import save_file  # imports torch, which --help and early checks do not need

    with writing(path):
        save_file(dict(tensors), path, metadata=metadata)


def tensor_header(kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[list[str], bytes]:
    """The order in which safetensors writes tensors of these dtypes and shapes, and the header that it writes."""
    order = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = kinds[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        known = DTYPE_NAMES.get(str(dtype).removeprefix("torch."), str(dtype))  # any name of similar length for others
        header[name] = {"dtype": known, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `path` if the block succeeds and is removed otherwise."""
    refuse_existing(path, overwrite=overwrite)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep_up(path)
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=_prefix(path)))
        try:
            with _held(beside):
                yield beside
                for file in beside.rglob("*"):  # safetensors makes files that only their owner may read
                    os.chmod(file, (0o777 if file.is_dir() else 0o666) & ~_umask())
                    if file.is_file():  # the content is on disk before the name, so a power cut cannot truncate it
                        with file.open("rb+") as content:
                            os.fsync(content.fileno())
                os.chmod(beside, 0o777 & ~_umask())
                _swap(beside, path, overwrite=overwrite)
        finally:
            shutil.rmtree(beside, ignore_errors=True)  # the failed or the replaced folder


@contextmanager
def lock_folder(folder: Path, name: str) -> Iterator[None]:
    """Allow one process at a time in a folder; the lock ends with its process, however that ends."""
    with writing(folder):
        lock = (folder / f".lock-{name}").open("w")
    with lock:
        if not _hold(lock.fileno()):
            raise StorageError(f"another run is writing to {folder}; wait for it, or choose another output")
        yield


def _hold(handle: int) -> bool:
    """Lock an open file or folder until it is closed; False if another process holds it."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Lock a file or folder, so that no other run removes it as a leftover; False if another process holds it."""
    if fcntl is None:
        yield True
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        yield _hold(handle)
    finally:
        os.close(handle)


def _prefix(path: Path) -> str:
    return f".{path.name}.corp-"  # unique to corp, because leftovers are removed


def _sweep_up(path: Path) -> None:
    """Remove leftovers of killed runs beside `path`, which no process holds any more."""
    if fcntl is None:
        return
    ours = re.compile(re.escape(_prefix(path)) + r"[a-z0-9_]{8}")  # as tempfile names them
    with os.scandir(path.parent) as entries:
        left = [Path(entry.path) for entry in entries if ours.fullmatch(entry.name) and not entry.is_symlink()]
    for old in left:
        with suppress(OSError), _held(old) as free:  # it may no longer exist
            if free:
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Refuse an output that exists, before the work rather than after it."""
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise StorageError(f"{path} exists; choose another output, or pass overwrite=True")
        if not path.is_dir() or path.is_symlink():
            raise StorageError(f"{path} is not a folder, so corp does not replace it")


def _swap(beside: Path, path: Path, *, overwrite: bool) -> None:
    refuse_existing(path, overwrite=overwrite)  # it may have been created while the folder was filled
    if not path.exists():
        os.rename(beside, path)
    elif not _exchanged(beside, path):
        old = beside.with_name(f"{beside.name}.old")
        os.rename(path, old)
        os.rename(beside, path)
        shutil.rmtree(old, ignore_errors=True)


def _exchanged(first: Path, second: Path) -> bool:
    """Exchange two names in one step, so that both exist at every moment; False if the system cannot do that."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "renameat2"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(ctypes.CDLL(None).renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0)


def read_json(path: Path) -> Any:
    """Parse a JSON file that may be untrusted."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise StorageError(f"{path} has {size} bytes; corp reads at most {MAX_JSON_BYTES}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON: {error}") from error


# What kind of folder contains this file.
KINDS = {
    "corp.json": "a folder that corp saved (corp prune, corp.save)",
    "statistics.json": "a folder of statistics (corp calibrate)",
}


def file_in(folder: Path, name: str) -> Path:
    """A file of the folder that exists and does not lead out of it."""
    path = folder / name
    if not path.is_file():
        kind = KINDS.get(name, "a folder that corp saved")
        raise StorageError(f"{folder} has no {name}: it is not {kind}, or it is incomplete")
    if path.resolve().parent != folder.resolve():
        raise StorageError(f"{path} is a link that leaves its folder; corp does not follow it")
    return path


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
