"""Outputs appear whole or not at all: write beside, then rename. And reading small files with a limit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has no flock; there two runs into one folder are not told apart
    fcntl = None  # type: ignore[assignment]

from corp.errors import StorageError

MAX_JSON_BYTES = 256 * 2**20  # far above any plan; a stranger's file may claim to be anything


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, never sees half of it."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as beside:
            beside.write(text)
            beside.flush()
            os.fsync(beside.fileno())
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        os.chmod(beside.name, 0o666 & ~_umask())
        os.replace(beside.name, path)
    except OSError as error:
        Path(beside.name).unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def new_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well and vanishes when it does not."""
    refuse_existing(path, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    try:
        yield beside
        for file in beside.rglob("*"):  # safetensors makes files that only their owner may read
            os.chmod(file, (0o777 if file.is_dir() else 0o666) & ~_umask())
        os.chmod(beside, 0o777 & ~_umask())
        _swap(beside, path, overwrite=overwrite)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # only there when something went wrong


@contextmanager
def lock_folder(folder: Path, name: str) -> Iterator[None]:
    """One process at a time in a folder; the lock dies with its process, however that ends."""
    try:
        with (folder / f".lock-{name}").open("w") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise StorageError(f"another run is writing to {folder}; wait for it, or choose another output") from error


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Say before the work, not after it, that the output is in the way."""
    if path.exists() or path.is_symlink():
        if not overwrite:
            raise StorageError(f"{path} exists; choose another output, or pass overwrite (--overwrite)")
        if not path.is_dir() or path.is_symlink():
            raise StorageError(f"{path} is not a folder; it is left alone")


def _swap(beside: Path, path: Path, *, overwrite: bool) -> None:
    refuse_existing(path, overwrite=overwrite)  # it may have appeared while the folder was filled
    if not path.exists():
        os.rename(beside, path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    os.rename(path, old / path.name)
    os.rename(beside, path)
    shutil.rmtree(old, ignore_errors=True)


def read_json(path: Path) -> Any:
    """Parse a JSON file that may come from anybody."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise StorageError(f"{path} has {size} bytes, more than the {MAX_JSON_BYTES} that are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{path} is not valid JSON: {error}") from error


def file_in(folder: Path, name: str) -> Path:
    """A file of the folder that exists and does not lead out of it."""
    path = folder / name
    if not path.is_file():
        raise StorageError(f"{folder} has no {name}; it is not a folder that corp saved, or not all of it")
    if path.resolve().parent != folder.resolve():
        raise StorageError(f"{path} is a link out of its folder; it is not followed")
    return path


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
