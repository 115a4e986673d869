"""The folder of a running calibration: its identity and its sums so far, so that a killed run loses little."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from corp.calibration.collector import Collector
from corp.calibration.site_sums import entry_of, read_sums
from corp.calibration.statistics import read_entries, write_site
from corp.errors import StorageError
from corp.io.files import file_in, lock_folder, read_json, refuse_existing, write_text, writing
from corp.numerics.place import Place

CHECKPOINT_SHARE = 0.05  # of the time may go into checkpoints


class Checkpoint:
    """Periodic checkpoints of the sums in the folder of a run; each worker has its own."""

    def __init__(self, folder: Path, name: str, seconds: float) -> None:
        self.path = folder / f"checkpoint-{name}"
        self.seconds = seconds
        self.last = time.monotonic()

    def maybe_write(self, collector: Collector, samples: int, next_batch: int) -> None:
        if time.monotonic() - self.last >= self.seconds:
            start = time.monotonic()
            self.write(collector, samples, next_batch)
            self.last = time.monotonic()
            self.seconds = max(self.seconds, (self.last - start) / CHECKPOINT_SHARE)

    def write(self, collector: Collector, samples: int, next_batch: int) -> None:
        """Write the sums first, under a new name; then the small file that says which sums are valid."""
        generation = f"{self.path.name}.{next_batch}"
        folder = self.path.with_name(generation)
        shutil.rmtree(folder, ignore_errors=True)
        with writing(folder):
            folder.mkdir()
            entries = {name: write_site(folder, i, sums) for i, (name, sums) in enumerate(collector.sums.items())}
        content = {"folder": generation, "samples": samples, "next": next_batch}
        content["sites"] = {name: vars(entry) for name, entry in entries.items()}
        write_text(self.path.with_suffix(".json"), json.dumps(content))
        for old in self.path.parent.glob(f"{self.path.name}.*"):
            if old.is_dir() and old.name != generation:
                shutil.rmtree(old, ignore_errors=True)

    def restore(self, collector: Collector, device: torch.device) -> tuple[int, int] | None:
        """Put the last checkpoint's sums into the collector; returns (samples, next batch), or None without one."""
        index = self.path.with_suffix(".json")
        if not index.is_file():
            return None
        raw = read_progress(index, "samples", "next")
        generation = str(raw.get("folder"))
        entries = read_entries(index, raw["sites"])
        expected = {name: entry_of(sums, "") for name, sums in collector.sums.items()}
        found = {name: replace(entry, file="") for name, entry in entries.items()}
        if not generation.startswith(self.path.name) or found != expected:
            raise _damaged(index)
        for name, entry in entries.items():
            sums = read_sums(file_in(self.path.with_name(generation), entry.file), entry)
            collector.sums[name] = sums.at(Place.exactly(device))
        return int(raw["samples"]), int(raw["next"])


def read_progress(file: Path, *counts: str) -> dict[str, Any]:
    """A run's own record, which must have these whole numbers; a run continues only from files that it wrote."""
    raw = read_json(file)
    if not isinstance(raw, dict) or not all(type(raw.get(name)) is int and raw[name] >= 0 for name in counts):
        raise _damaged(file)
    if not isinstance(raw.get("sites"), dict):
        raise _damaged(file)
    return raw


def read_groups(file: Path, names: set[str]) -> list[list[str]]:
    """Which sites each pass collects: all of `names`, each once."""
    groups = read_json(file)
    if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
        raise _damaged(file)
    every = [name for group in groups for name in group]
    if not all(isinstance(name, str) for name in every) or sorted(every) != sorted(names):
        raise _damaged(file)
    return groups


def _damaged(file: Path) -> StorageError:
    return StorageError(f"{file} is damaged, or was not written by corp; fresh=True starts over")


def prepare_folder(partial: Path, identity: dict[str, Any], *, fresh: bool) -> None:
    """The folder of a run: a new one, or that of a killed run of the same command."""
    record = partial / "run.json"
    identity = json.loads(json.dumps(identity))
    if partial.exists() and (fresh or not record.is_file()):  # without its record the run cannot be identified
        with lock_folder(partial, "rank-0"):
            shutil.rmtree(partial, ignore_errors=True)
    if record.is_file():
        before = read_json(record)
        if not isinstance(before, dict):
            raise _damaged(record)
        changed = [key for key in {**before, **identity} if before.get(key) != identity.get(key)]
        if changed:
            told = "; ".join(f"{key}: {before.get(key)!r} then, {identity.get(key)!r} now" for key in changed[:4])
            raise StorageError(f"there is an unfinished run of another command ({told}); fresh=True starts over")
        return
    with writing(partial):
        partial.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps(identity))


def publish(partial: Path, out: Path) -> None:
    """Move the finished run to its final name, without its temporary files.

    The run's identity is removed last: as long as it exists, a killed run only has to publish again.
    """
    refuse_existing(out, overwrite=False)
    with writing(out):
        # Hidden files are locks, and what safetensors was writing when an earlier run was killed (.tmpAbCdEf).
        for leftover in (*partial.glob("checkpoint-*"), *partial.glob("pass*.json"), *partial.glob(".*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        (partial / "run.json").unlink()
        partial.rename(out)
