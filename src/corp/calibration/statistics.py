"""The result of calibration: one set of sums per site, and where they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from corp.calibration.batches import is_description
from corp.calibration.grams import Grams
from corp.calibration.moments import Moments
from corp.calibration.pairs import PairSums
from corp.calibration.site_sums import AnySums, Entry, SiteSums, Sums, added, changed, entry_of, stored, write_sums
from corp.errors import StatisticsError
from corp.io.files import file_in, new_folder, read_json, write_text
from corp.io.tables import Tabular
from corp.numerics.place import Place

FORMAT, FORMAT_VERSION, MANIFEST = "corp-statistics", 4, "statistics.json"


@dataclass(repr=False)
class Statistics(Tabular):
    """Sums by site name (in memory, or read from a folder one at a time). Statistics can be added.

    `samples`   how many samples of the data were seen
    `weights`   fingerprint of the dense weights: statistics of other weights are refused
    `inputs`    shapes and dtypes of one sample, enough to count a model's operations later
    `origin`    where they came from: model, data, preprocessing, seed, versions
    """

    sums: Mapping[str, AnySums] = field(default_factory=dict)
    samples: int = 0
    weights: str = ""
    inputs: Any = None
    origin: dict[str, Any] = field(default_factory=dict)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, str]]]:
        """Where they came from; the sums are not read."""
        rows = [(str(key), str(value)) for key, value in self.origin.items()]
        return f"statistics of {self.samples} samples at {len(self.sums)} sites", ("origin", ""), rows

    def moments_of(self, name: str) -> SiteSums[Moments]:
        return _of_kind(Moments, self.sums, name)

    def grams_of(self, name: str) -> SiteSums[Grams]:
        return _of_kind(Grams, self.sums, name)

    def pairs_of(self, name: str) -> SiteSums[PairSums]:
        return _of_kind(PairSums, self.sums, name)

    def fitted(self) -> Statistics:
        """The statistics without the held-out batches, so that models made from them can be evaluated on those."""
        return replace(self, sums=changed(self.sums, lambda _name, sums: sums.fitted()))

    def at(self, places: Mapping[str, Place]) -> Statistics:
        """The statistics with the sums of every site at its place, moved on access."""

        def moved(name: str, sums: AnySums) -> AnySums:
            return sums.at(places[name]) if name in places else sums

        return replace(self, sums=changed(self.sums, moved))

    def __add__(self, other: Statistics) -> Statistics:
        header = merged_header(self, other)
        return Statistics({name: added(self.sums[name], other.sums[name]) for name in self.sums}, **header)

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder, completely or not at all."""
        with new_folder(Path(path), overwrite=overwrite) as folder:
            entries = {name: write_site(folder, number, self.sums[name]) for number, name in enumerate(self.sums)}
            write_manifest(folder, self, entries)

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Open a folder that `save` or `corp calibrate` wrote; the sums are read when they are needed."""
        folder = Path(path)
        manifest = read_manifest(folder)
        entries = read_entries(folder / MANIFEST, manifest["sites"])
        header: dict[str, Any] = {key: manifest.get(key) for key in ("samples", "weights", "inputs", "origin")}
        return cls(stored(entries, lambda file: file_in(folder, file)), **header)


def merged_header(first: Statistics, second: Statistics) -> dict[str, Any]:
    """Samples, weights, inputs and origin of the sum of two; refuses statistics that cannot be added."""
    if first.weights != second.weights:
        raise StatisticsError("these statistics were taken with different weights and cannot be added")
    if set(first.sums) != set(second.sums):
        raise StatisticsError("these statistics cover different sites and cannot be added")
    a, b = first.origin, second.origin
    common = {key: value for key, value in a.items() if b.get(key) == value and key != "parts"}
    parts = [*a.get("parts", [a]), *b.get("parts", [b])]  # listed, to detect data that is counted twice
    return {
        "samples": first.samples + second.samples,
        "weights": first.weights,
        "inputs": first.inputs,
        "origin": {**common, "parts": parts} if a or b else {},
    }


def merge(parts: Sequence[Path], out: Path) -> Statistics:
    """Add the statistics of several folders into a new one, one site in memory at a time."""
    total, *others = map(Statistics.load, parts)
    for other in others:
        if any(part in _sources(total) for part in _sources(other)):
            raise StatisticsError("two of these statistics come from the same data; it would be counted twice")
        total = _sum_on_demand(total, other)
    total.save(out)
    return Statistics.load(out)


def _sum_on_demand(first: Statistics, second: Statistics) -> Statistics:
    """The sum of two, in which a site's sums are read and added on access."""
    sums = changed(first.sums, lambda name, sums: added(sums, second.sums[name]))
    return Statistics(sums, **merged_header(first, second))


def _sources(stats: Statistics) -> list[str]:
    """Fingerprints of the data that the statistics contain."""
    parts = stats.origin.get("parts", [stats.origin])
    return [part["data fingerprint"] for part in parts if "data fingerprint" in part]


def write_site(folder: Path, number: int, sums: AnySums) -> Entry:
    """Write one site's file into a statistics folder; returns its entry for the manifest."""
    entry = entry_of(sums, f"site-{number:04}.safetensors")
    write_sums(folder / entry.file, sums)
    return entry


def write_manifest(folder: Path, header: Statistics, entries: Mapping[str, Entry]) -> None:
    content = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "samples": header.samples,
        "weights": header.weights,
        "inputs": header.inputs,
        "origin": header.origin,
        "sites": {name: asdict(entry) for name, entry in entries.items()},
    }
    write_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise StatisticsError(f"{folder} is not a folder of statistics; make one with corp calibrate")
    manifest = read_json(file_in(folder, MANIFEST))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StatisticsError(f"{folder / MANIFEST} does not describe statistics of corp")
    if manifest.get("version") != FORMAT_VERSION:
        raise StatisticsError(f"{folder} has version {manifest.get('version')!r}, this corp reads {FORMAT_VERSION}")
    kinds = {"samples": int, "weights": str, "origin": dict, "sites": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind) or isinstance(manifest[key], bool):
            raise StatisticsError(f"{folder / MANIFEST}: {key!r} is not of type {kind.__name__}")
    if manifest["samples"] < 0 or not is_description(manifest.get("inputs")):
        raise StatisticsError(f"{folder / MANIFEST}: 'samples' or 'inputs' is not what calibration writes")
    return manifest


def read_entries(file: Path, sites: Any) -> dict[str, Entry]:
    """The entries of sites in a JSON file, which may be untrusted."""
    if not isinstance(sites, dict):
        raise StatisticsError(f"{file}: 'sites' is not an object")
    return {str(name): _entry(file, name, raw) for name, raw in sites.items()}


def _entry(file: Path, name: str, raw: Any) -> Entry:
    keys = {"width": int, "heads": int, "file": str, "kv_heads": int}
    if not isinstance(raw, dict) or set(raw) != set(keys) or any(type(raw[k]) is not t for k, t in keys.items()):
        raise StatisticsError(f"{file}: the entry of site {name!r} is malformed")
    if (
        not 1 <= raw["width"] <= 2**20
        or not 0 <= raw["kv_heads"] <= raw["heads"] <= 2**16
        or (raw["kv_heads"] and raw["heads"] % raw["kv_heads"])
        or Path(raw["file"]).name != raw["file"]
    ):
        raise StatisticsError(f"{file}: the entry of site {name!r} has impossible values")
    return Entry(**raw)


def _of_kind(kind: type[Sums], sums: Mapping[str, AnySums], name: str) -> SiteSums[Sums]:
    if name not in sums:
        raise StatisticsError(f"no statistics of site {name!r}; calibrate this model with it included")
    found: Any = sums[name]
    if not isinstance(found.fit, kind):
        raise StatisticsError(f"the statistics of {name!r} are {type(found.fit).__name__}, not {kind.__name__}")
    checked: SiteSums[Sums] = found
    return checked
