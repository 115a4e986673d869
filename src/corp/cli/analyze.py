"""corp analyze: how redundant the layers of a model are, before anything is pruned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from xml.etree.ElementTree import Element

import typer

from corp.adapters.registry import find_sites
from corp.calibration.statistics import Statistics
from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, progress, show_json, show_table
from corp.cli.expand import expanded
from corp.cli.inputs import calibrated
from corp.cli.models import load_model
from corp.errors import DataError
from corp.evaluate.redundancy import Analysis, Redundancy
from corp.evaluate.redundancy import analyze as measure
from corp.io.files import new_folder, refuse_existing, write_json
from corp.io.tables import write_csv
from corp.report import svg
from corp.sites import Sites

COLUMNS = ("site", "dimension", "effective rank", "ratio", "k95 channels", "ratio", "k95 eigenvalues", "ratio")
PICTURE, TABLE, DATA = "redundancy.svg", "redundancy.csv", "redundancy.json"


@command
@expanded(first=("calib", "out"))
def analyze(
    source: a.Source,
    collection: a.Collection,
    stats: a.Stats = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for a picture, a CSV and a JSON file.")
    ] = None,
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Show how redundant the MLP channels and Q/K dimensions of MODEL are on the data of --calib or --stats."""
    if stats is None:
        early.require_source(source)
    if out is not None:
        refuse_existing(out, overwrite=overwrite)
    model, source = source.model, replace(source, images=1000)
    sites, found = _statistics(source, stats, collection.settings())
    with progress("analysing", len(sites), "sites") as advance:
        analysis = measure(sites, found, advance)
    content = {"model": model, "samples": found.samples, **analysis.to_dict()}
    if out is not None:
        _write(out, analysis, content, title=f"{model}, {found.samples} samples", overwrite=overwrite)
    if json:
        show_json(content)
    else:
        _show(analysis, found.samples)


def _statistics(source: a.Source, stats: Path | None, settings: Any) -> tuple[Sites, Statistics]:
    """Sites and sums. Sums of an earlier calibration need no weights: the table describes the model they come from."""
    if stats is None:
        model, found = calibrated(source, settings=settings)
        return find_sites(model), found
    if source.calib:
        raise DataError("--stats replaces the data: leave out either --stats or --calib")
    return find_sites(load_model(source.model, source.weights, pretrained=False)), Statistics.load(stats)


def _show(analysis: Analysis, samples: int) -> None:
    if rows := analysis.of("mlp"):
        table = [[row.site, *_cells(row), f"{row.sparsity:.3f}"] for row in rows]
        show_table(f"MLP channels ({samples} samples)", (*COLUMNS, "sparsity"), table)
    if rows := analysis.of("q", "k"):
        table = [[f"{row.site} {row.what} head {row.head}", *_cells(row)] for row in rows]
        show_table(f"queries and keys ({samples} samples)", COLUMNS, table)
    for site, reason in analysis.unavailable.items():
        note(f"{site}: queries and keys are not available: {reason}")


def _cells(row: Redundancy) -> list[str]:
    cells = [str(row.dim), f"{row.effective_rank:.1f}", f"{row.rank_ratio:.3f}"]
    for k in (row.k95_channels, row.k95_eigenvalues):
        cells += [str(k), f"{k / row.dim:.3f}"]
    return cells


def _write(out: Path, analysis: Analysis, content: dict[str, Any], *, title: str, overwrite: bool) -> None:
    with new_folder(out, overwrite=overwrite) as folder:
        write_json(folder / DATA, content)
        write_csv(folder / TABLE, content["rows"], first="site")
        svg.save(_picture(analysis, title), folder / PICTURE)


def _picture(analysis: Analysis, title: str) -> Element:
    """Shares per MLP in the model's order; beside them the mean and range over heads per attention."""
    rows = analysis.of("mlp")
    curves = {
        "effective rank / width": [row.rank_ratio for row in rows],
        "95 % of variance: eigenvalues / width": [row.k95_eigenvalues / row.dim for row in rows],
        "95 % of variance: channels / width": [row.k95_channels / row.dim for row in rows],
        "activation sparsity": [row.sparsity or 0.0 for row in rows],
    }
    mlps = [svg.Series(name, list(enumerate(shares))) for name, shares in curves.items()]
    heads = [_range(analysis.of(what), name) for what, name in (("q", "queries"), ("k", "keys"))]
    shown, x_shown = "{:.2g}".format, "{:g}".format
    left = svg.line_chart(title, mlps, ("MLP, in the model's order", "share of the width"), shown, x_shown)
    axes = "attention, in the model's order", "effective rank / width, mean and range over heads"
    return svg.picture(title, left, svg.line_chart(title, heads, axes, shown, x_shown))


def _range(rows: list[Redundancy], name: str) -> svg.Series:
    """Effective rank over width per attention: the mean over its heads as a line, their range as a band."""
    sites: dict[str, list[float]] = {}
    for row in rows:
        sites.setdefault(row.site, []).append(row.rank_ratio)
    ratios = list(enumerate(sites.values()))
    return svg.Series(name, [(i, sum(r) / len(r)) for i, r in ratios], [(i, min(r), max(r)) for i, r in ratios])
