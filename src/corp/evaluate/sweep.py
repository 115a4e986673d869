"""One calibration, many plans: a grid of recipes, each applied and measured, in a folder that can be resumed."""

from __future__ import annotations

import json
import shutil
import statistics as of
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from torch import nn

from corp import api
from corp.adapters.registry import find_sites
from corp.calibration.checkpoint import prepare_folder
from corp.calibration.settings import Settings, enough_tokens
from corp.calibration.statistics import Statistics, merge
from corp.errors import DataError, RecipeError
from corp.io.files import lock_folder, read_json, refuse_existing, write_text, writing
from corp.io.observer import SILENT, Advance, Observer, timing
from corp.recipe import KINDS, TOGETHER, Recipe, preset_of
from corp.sites import AttentionSite

Row = dict[str, Any]
Evaluate = Callable[[Sequence[nn.Module]], list[Row]]  # one row of numbers per model, in one pass over the data
CASE = ("samples", *KINDS, "preset", "rank", "compensate", "ridge")  # what identifies a row
AT_ONCE, AT_ONCE_BYTES = 8, 2 * 2**30  # models evaluated in one pass over the data
ROWS, SECONDS, RESULT, STATISTICS = "rows.json", "seconds.json", "sweep.json", "statistics"


def grid(
    sparsities: Sequence[float],
    kinds: Sequence[str] = ("both",),
    *,
    presets: Sequence[str] = ("paper",),
    ranks: Sequence[str] = ("",),
    compensations: Sequence[str] = ("",),
    ridges: Sequence[float] = (1e-3,),
) -> list[Recipe]:
    """Every combination as a recipe; "" stands for the preset's value."""
    if unknown := sorted(set(kinds) - set(TOGETHER)):
        raise RecipeError(f"kinds: {', '.join(unknown)} is not among {', '.join(TOGETHER)}")
    return [
        Recipe.preset(
            preset,
            **dict.fromkeys(TOGETHER[kind], sparsity),
            **{name: value for name, value in (("rank", rank), ("compensate", compensate)) if value},
            ridge=ridge,
        )
        for kind, preset, rank, compensate, ridge, sparsity in product(
            kinds, presets, ranks, compensations, ridges, sparsities
        )
    ]


@dataclass
class Sweep:
    """The dense model, the recipes and what is measured; `folder`, if any, holds finished results."""

    dense: nn.Module
    recipes: Sequence[Recipe]
    evaluate: Evaluate | None = None
    folder: Path | None = None
    rows: list[Row] = field(default_factory=list)
    dense_row: Row | None = None

    def __post_init__(self) -> None:
        if self.folder is not None and (self.folder / ROWS).is_file():
            known = read_json(self.folder / ROWS)
            self.rows, self.dense_row = known["rows"], known["dense"]

    def run(self, stats: Statistics, progress: Advance | None = None) -> None:
        """Apply every recipe to the dense model, a few at a time, and measure them together."""
        done = {_key(row) for row in self.rows}
        todo = []
        for recipe in self.recipes:
            case = {"samples": stats.samples, "preset": preset_of(recipe)}
            case |= {name: getattr(recipe, name) for name in CASE if name not in case}
            if _key(case) not in done:
                todo.append((recipe, case))
        if progress and len(todo) < len(self.recipes):
            progress(len(self.recipes) - len(todo))
        step = self._at_once()
        for some in (todo[i : i + step] for i in range(0, len(todo), step)):
            made = [self._prune(stats, recipe, case) for recipe, case in some]
            self._measure([model for model, _ in made], [row for _, row in made])
            self._keep()
            if progress:
                progress(len(some))

    def _at_once(self) -> int:
        size = sum(p.numel() * p.element_size() for p in self.dense.parameters())
        return max(1, min(AT_ONCE, AT_ONCE_BYTES // max(1, size))) if self.evaluate else 1

    def _prune(self, stats: Statistics, recipe: Recipe, case: Row) -> tuple[nn.Module, Row]:
        with timing() as seconds:
            result = api.prune(self.dense, None, recipe, stats=stats)
        report, plan = result.report, result.plan
        row = {**case, "params": report.params[1], "macs": report.macs[1] if report.macs else None}
        for kind in KINDS:
            errors = [site.relative_error for site in plan.sites if site.kind == kind]
            row[f"{kind} error"] = sum(errors) / len(errors) if errors else None
        row |= {f"{name} seconds": seconds.get(name, 0.0) for name in ("rank", "plan", "compensate")}
        if self.dense_row is None:
            self.dense_row = {"params": report.params[0], "macs": report.macs[0] if report.macs else None}
        return result.model, row

    def _measure(self, models: list[nn.Module], rows: list[Row]) -> None:
        if self.evaluate is None or self.dense_row is None:
            self.rows += rows
            return
        first = set(self.dense_row) == {"params", "macs"}  # the dense model is measured in the first pass only
        numbers = self.evaluate([self.dense, *models] if first else models)
        if first:
            self.dense_row |= numbers.pop(0)
        self.rows += [{**row, **found} for row, found in zip(rows, numbers, strict=True)]

    def _keep(self) -> None:
        if self.folder is not None:
            write_text(self.folder / ROWS, json.dumps({"dense": self.dense_row, "rows": self.rows}))


def statistics_of_sizes(
    model: nn.Module,
    data: Any,
    sizes: Sequence[int],
    folder: Path,
    *,
    seed: int,
    origin: dict[str, Any],
    settings: Settings,
    observer: Observer = SILENT,
) -> Iterator[tuple[Statistics, float | None]]:
    """Statistics of the first sizes[0], sizes[1] … samples of a random order, and the seconds until each.

    One pass is enough, because sums add. The seconds of an interrupted run are unknown.
    """
    check_sizes(sizes, data.samples)
    tokens = settings.tokens
    if tokens == "auto":  # the same for every part, and enough for the smallest
        widths = [site.inputs for site in find_sites(model) if not isinstance(site, AttentionSite)]
        tokens = max(enough_tokens(width, sizes[0]) for width in widths) if widths else "auto"
    seconds = read_json(folder / SECONDS) if (folder / SECONDS).is_file() else {}
    before: Path | None = None
    for size, part in zip(sizes, data.parts(sizes, seed), strict=True):
        whole, here = folder / f"{STATISTICS}-{size}", folder / f"part-{size}"
        if not whole.is_dir():
            fresh = not list(folder.glob(f".{here.name}.*"))  # no trace of an interrupted run
            start = time.perf_counter()
            if not here.is_dir():
                now = {**origin, "data fingerprint": part.fingerprint(), "samples": part.samples}
                told = Settings(tokens, settings.memory)
                api.calibrate(model, part, out=here, settings=told, origin=now, observer=observer)
                if unreadable := getattr(part, "bad", []):
                    data.bad += unreadable
                if fresh:
                    seconds[str(size)] = time.perf_counter() - start
                    write_text(folder / SECONDS, json.dumps(seconds))
            if before is None:
                here.rename(whole)
            else:
                merge([before, here], whole)
        before = whole
        known: list[Any] = [seconds.get(str(s)) for s in sizes[: list(sizes).index(size) + 1]]
        yield Statistics.load(whole), None if None in known else sum(known)


def check_sizes(sizes: Sequence[int], samples: int) -> None:
    if list(sizes) != sorted(set(sizes)) or sizes[0] < 1 or sizes[-1] > samples:
        raise DataError(f"calibration sizes must ascend and stay within the {samples} samples there are: {list(sizes)}")


def result(sweep: Sweep, about: Mapping[str, Any], calibration: Mapping[int, float | None]) -> dict[str, Any]:
    """All results of a sweep, as one JSON object."""
    return {
        "format": "corp-sweep",
        **about,
        "dense": sweep.dense_row,
        "runtime": [
            {"samples": samples, "calibrate": seconds, **_runtime([r for r in sweep.rows if r["samples"] == samples])}
            for samples, seconds in calibration.items()
        ],
        "rows": sweep.rows,
    }


def _runtime(rows: Sequence[Row]) -> Row:
    """Medians over the recipes that compensate in full and change most."""
    full = [row for row in rows if row["compensate"] == "full"] or list(rows)
    most = [row for row in full if row["mlp"] and row["attn"]] or full
    return {name: of.median(row[f"{name} seconds"] for row in most) for name in ("rank", "plan", "compensate")}


@contextmanager
def working_folder(out: Path | None, identity: dict[str, Any], *, fresh: bool) -> Iterator[Path]:
    """The folder of a sweep: that of a killed run of the same command, a new one, or a temporary one.

    If the block succeeds, the folder becomes `out`, without temporary files; until then a kill loses only the current
    case.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="corp-sweep-") as hidden:
            yield Path(hidden)
        return
    refuse_existing(out, overwrite=False)
    partial = out.with_name(f".{out.name}.partial")
    prepare_folder(partial, identity, fresh=fresh)
    with lock_folder(partial, "rank-0"):
        try:
            yield partial
        except BaseException:
            if not any(path.is_dir() or path.name == ROWS for path in partial.iterdir()):
                shutil.rmtree(partial, ignore_errors=True)  # nothing was finished that could be continued
            raise
        refuse_existing(out, overwrite=False)
        with writing(out):
            _tidy(partial)
            partial.rename(out)


def _tidy(partial: Path) -> None:
    """Keep results, figures and the statistics of all the data; remove those of parts of it."""
    sizes = sorted(partial.glob(f"{STATISTICS}-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if sizes:
        shutil.rmtree(partial / STATISTICS, ignore_errors=True)  # of a run that was killed at this point
        sizes.pop().rename(partial / STATISTICS)
    for leftover in (*sizes, *partial.glob("part-*"), *partial.glob(".*")):  # locks, and what killed runs left
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    for record in (SECONDS, ROWS, "run.json"):  # the run's identity is removed last
        (partial / record).unlink(missing_ok=True)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in CASE)
