"""corp report: one page about one or more runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, show_json
from corp.errors import StorageError
from corp.evaluate.sweep import RESULT
from corp.io.files import file_in, read_json, write_text
from corp.planning.plan import Plan
from corp.planning.report import Report
from corp.report.html import Cell, Run, Study, curves, page
from corp.report.svg import Series
from corp.report.sweeps import METRICS, decimals, lines, number, percents
from corp.storage.folder import MANIFEST, PLAN, REPORT, read_manifest

DEMO = "demo.json"
DEMO_LABELS = {"corp": "corp, the default", "paper": "the paper's recipe", "none": "no compensation"}
WANTED = "a folder of corp prune or corp.save, a folder (or --json) of corp sweep, or a folder of corp demo"


@command
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of corp prune, corp sweep and corp demo.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Write one self-contained HTML page about RUNS: what was removed, what it cost, how to repeat it."""
    early.require_output_file(out, overwrite=overwrite)
    parts = [read_part(path) for path in runs]
    read = [part for part in parts if isinstance(part, Run)]
    write_text(out, page(read, [part for part in parts if isinstance(part, Study)]))
    if json:
        show_json({"output": str(out), "runs": [run.name for run in read], "curves": len(parts) - len(read)})
    else:
        note(f"wrote {len(read)} run(s) and {len(parts) - len(read)} set(s) of curves; next: open {out} in a browser")


def read_part(path: Path) -> Run | Study:
    """The run, sweep or demo in this path."""
    name = path.name
    for file in (DEMO, RESULT):
        if path.is_dir() and not (path / MANIFEST).exists() and (path / file).is_file():
            path = path / file
    if path.is_dir():
        return read_run(path)
    content = read_json(path)
    if isinstance(content, dict) and content.get("format") == "corp-sweep":
        return sweep_study(name, content.get("rows"))
    if isinstance(content, dict) and "rows" in content and "dense" in content:
        return demo_study(content)
    raise StorageError(f"{path} is neither a sweep nor a demo; give {WANTED}")


def read_run(folder: Path) -> Run:
    if not (folder / MANIFEST).is_file():
        raise StorageError(f"{folder} is not a run: it has no {MANIFEST}; give {WANTED}")
    manifest = read_manifest(folder)
    plan = Plan.load(file_in(folder, PLAN))
    counts = read_json(file_in(folder, REPORT))
    if not isinstance(counts, dict) or (params := _pair(counts.get("params"))) is None:
        raise StorageError(f"{folder / REPORT} does not count the parameters before and after; save the run again")
    return Run(
        folder.resolve().name, manifest, Report(plan, params, _pair(counts.get("macs")), _times(counts.get("run")))
    )


def _times(raw: object) -> dict[str, Any] | None:
    """The record of estimated and measured times, if it is one."""
    stages = raw.get("stages") if isinstance(raw, dict) else None
    if not isinstance(stages, list) or not all(isinstance(one, dict) for one in stages):
        return None
    kept = [
        {"stage": str(one.get("stage")), **{k: number(one.get(k)) for k in ("estimated", "seconds")}} for one in stages
    ]
    return {"stages": kept} if all(None not in one.values() for one in kept) else None


def _pair(raw: object) -> tuple[int, int] | None:
    before, after = (raw.get("before"), raw.get("after")) if isinstance(raw, dict) else (None, None)
    if type(before) is int and type(after) is int and min(before, after) >= 0 and max(before, after) < 2**63:
        return before, after
    return None


def sweep_study(name: str, rows: Any) -> Study:
    """The rows of corp sweep: one line per combination of settings other than the sparsity."""
    known = isinstance(rows, list) and rows and all(isinstance(r, dict) and {"mlp", "attn"} <= r.keys() for r in rows)
    if not known:
        raise StorageError(f"{name} does not hold corp sweep's rows; give {WANTED}")
    charts = [
        curves(shown.title, shown.axis, series, percents if shown.share else decimals)
        for metric, shown in METRICS.items()
        if (series := [Series(label, points) for label, points in lines(rows, metric).items()])
    ]
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    sizes = sorted({row["samples"] for row in rows if isinstance(row.get("samples"), int)})
    pass_ = f"one pass over the data ({', '.join(map(str, sizes))} samples)" if sizes else "one pass over the data"
    return Study(f"Sweep: {name}", f"{len(rows)} recipes from {pass_}.", charts, columns, cells)


def demo_study(content: Mapping[str, Any]) -> Study:
    """The content of demo.json: accuracy of the default, the paper's recipe, and no compensation."""
    rows, dense = content.get("rows"), number(content.get("dense"))
    if not isinstance(rows, list) or dense is None or not all(isinstance(row, dict) for row in rows):
        raise StorageError("the demo's numbers are not complete: 'dense' and 'rows' are needed; run corp demo again")
    series = []
    for key, label in DEMO_LABELS.items():
        points = [(number(row.get("sparsity")), number(row.get(key))) for row in rows]
        series.append(Series(label, [(0.0, dense), *((x, y) for x, y in points if x is not None and y is not None)]))
    chart = curves("Accuracy without any training after pruning", "top-1 accuracy", series, percents)
    columns = ("sparsity", "params", "macs", *DEMO_LABELS)
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    counted = f"{content.get('model')}: accuracy on {content.get('images')} unseen images; dense {dense:.1%}."
    return Study("Accuracy against sparsity", counted, [chart], columns, cells)


def _cell(value: object) -> Cell:
    known = number(value)
    if known is None:
        return (None, "–") if value is None else str(value)
    return known, f"{known:.4f}" if isinstance(value, float) else str(value)
