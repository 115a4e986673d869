"""corp probe: fits a linear head on a frozen backbone, for corp eval --head."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from corp.calibration.batches import placement
from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, progress, show_json
from corp.cli.eval_dense import BATCH, parse_size, sized, whole_image
from corp.cli.models import load_model, place
from corp.data.dense import DensePairs, find_pairs
from corp.evaluate.heads import IGNORE, HeadInfo, save_head
from corp.evaluate.probe import fit_head


@command
def probe(
    model: a.Model,
    data: Annotated[list[Path], typer.Option(help="Images with maps: images/ + labels/, or X/ beside Xannot/.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The head's file (.safetensors).")],
    task: Annotated[Literal["segmentation", "depth"], typer.Option(help="What the maps show.")] = "segmentation",
    blocks: Annotated[int, typer.Option(help="Read the features of the last BLOCKS blocks.", min=1)] = 1,
    image_size: Annotated[
        str | None, typer.Option(help="HEIGHTxWIDTH; images are not cropped.", show_default="the model's own")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.", min=1, show_default="from the maps")] = None,
    ignore: Annotated[int, typer.Option(help="The label of unlabelled pixels.")] = IGNORE,
    depth_scale: Annotated[float, typer.Option(help="Units per metre in depth maps: 1000 for millimetres.")] = 1.0,
    weights: a.Weights = None,
    batch_size: Annotated[int, typer.Option(help="Images per forward pass.", min=1)] = BATCH,
    device: a.Device = "auto",
    dtype: a.Dtype = "auto",
    overwrite: a.Overwrite = False,
    json: a.Json = False,
) -> None:
    """Fit a linear head on MODEL's frozen features, in closed form (ridge regression), and save it."""
    info = HeadInfo(task, blocks, ignore, parse_size(image_size))
    early.require_output_file(out, overwrite=overwrite)
    early.require_paths("--data", data)
    pairs = [pair for folder in data for pair in find_pairs(folder)]
    backbone = place(load_model(model, weights), device, dtype)
    transform = whole_image(model, backbone, image_size, None)
    sized(backbone, transform.size)
    info = HeadInfo(task, blocks, ignore, (transform.size[0], transform.size[1]))
    batches = DensePairs(pairs, transform, batch_size=batch_size, scale=depth_scale)
    with progress(f"fitting a head on {placement(backbone)[0]}", len(pairs), "images") as advance:
        found = fit_head(backbone, batches, info, classes=classes, progress=advance)
    save_head(found.head, info, out, overwrite=overwrite)
    outputs, width = found.head.weight.shape
    if json:
        numbers = {"images": found.images, "ridge": found.ridge, "explained": found.explained}
        show_json({"head": str(out), "task": task, "outputs": outputs, "width": width, **numbers})
        return
    note(
        f"{found.images} images, {width} features, {outputs} output(s), ridge {found.ridge:g}: the head explains "
        f"{found.explained:.1%} of the variance on held-out images"
    )
    given = f" --weights {weights}" if weights else ""
    note(f"saved to {out}; next: corp eval {model}{given} --head {out} --data DIR")
