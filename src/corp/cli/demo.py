"""corp demo: shows the method in half a minute, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from corp import __version__, api
from corp.cli import arguments as a
from corp.cli.console import Console, command, note, progress, show_json, show_table
from corp.cli.report import DEMO, DEMO_LABELS, demo_study
from corp.data import digits
from corp.io.files import new_folder, refuse_existing, write_json
from corp.measure.cost import count_macs, count_params
from corp.recipe import Recipe
from corp.report import svg
from corp.report.html import Run, page

SPARSITIES = (0.3, 0.4, 0.5, 0.6, 0.7)
TITLE = "A small ViT on handwritten digits, pruned without training"
SHOWN = 0.5  # the sparsity whose layers the page shows


@command
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for picture and numbers.")] = Path("corp-demo"),
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Prune the built-in model at several sparsities: the default, the paper's recipe, and no compensation."""
    refuse_existing(out, overwrite=overwrite)
    model, data = digits.load_model(), digits.load_split()
    batches = data.calibration_images.split(128)
    dense = accuracy(model, data.test_images, data.test_labels)
    stats = api.calibrate(model, batches, observer=Console())
    rows, runs = [], []
    manifest = {"corp": __version__, "torch": torch.__version__, "command": "corp demo"}
    with progress("pruning", len(SPARSITIES) * len(DEMO_LABELS), "models") as advance:
        for sparsity in SPARSITIES:
            row: dict[str, Any] = {"sparsity": sparsity}
            for name, recipe in recipes(sparsity).items():
                result = api.prune(model, batches, recipe, stats=stats)
                if (sparsity, name) == (SHOWN, "corp"):
                    runs.append(Run("digits-vit", manifest, result.report))
                row[name] = accuracy(result.model, data.test_images, data.test_labels)
                advance(1)
            row["params"] = count_params(result.model) / count_params(model)
            row["macs"] = count_macs(result.model, data.test_images[:1]) / count_macs(model, data.test_images[:1])
            rows.append(row)
    content = {"model": "digits-vit", "images": len(data.test_images), "dense": dense, "rows": rows}
    with new_folder(out, overwrite=overwrite) as folder:
        write_json(folder / DEMO, content)
        study = demo_study(content)
        (folder / "report.html").write_text(page(runs, [study]), encoding="utf-8")
        svg.save(svg.picture(TITLE, study.charts[0].drawing), folder / "demo.svg")
    if json:
        show_json(content)
        return
    _show(content)
    note(f"saved to {out}")
    note(f"next: open {out / 'report.html'} in a browser")


def recipes(sparsity: float) -> dict[str, Recipe]:
    """The recipes that the demo compares at one sparsity, by the key of their accuracy in demo.json."""
    shares: dict[str, Any] = {"mlp": sparsity, "attn": sparsity}
    return {
        "corp": Recipe(**shares),
        "paper": Recipe.paper(**shares),
        "none": Recipe.paper(**shares, compensate="none"),
    }


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def _show(content: dict[str, Any]) -> None:
    columns = ("MLP channels and Q/K dimensions removed", "parameters", "MACs", *DEMO_LABELS.values())
    rows = [("none (dense model)", "100.0%", "100.0%", *[f"{content['dense']:.1%}"] * len(DEMO_LABELS))]
    for row in content["rows"]:
        shares = [f"{row[key]:.1%}" for key in ("params", "macs", *DEMO_LABELS)]
        rows.append((f"{row['sparsity']:.0%}", *shares))
    show_table(f"accuracy on {content['images']} unseen handwritten digits, no training after pruning", columns, rows)
