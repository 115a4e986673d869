"""Drawings as files: the SVG as it is, and a PNG of it, for which matplotlib paints the same elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

SCALE = 3  # pixels per unit of the drawing


def save(drawing: Element, path: Path) -> list[str]:
    """Write the drawing under the name `path` as PNG and SVG, the same bytes each time; return the files' names."""
    path.with_suffix(".svg").write_bytes(tostring(drawing, encoding="utf-8"))
    save_png(drawing, path.with_suffix(".png"))
    return [path.with_suffix(suffix).name for suffix in (".png", ".svg")]


def save_png(drawing: Element, path: Path) -> None:
    from matplotlib.figure import Figure  # imported only when a picture is wanted

    width, height = map(float, (drawing.get("viewBox") or "").split()[2:])
    figure = Figure(figsize=(width / 72, height / 72))  # one unit is one point
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _paint(axes, drawing, 0.0, 0.0)
    figure.savefig(path, dpi=72 * SCALE, metadata={"Software": None})


def _paint(axes: Any, parent: Element, dx: float, dy: float) -> None:
    """Rectangles, paths of straight lines, texts and translated groups: all that report.svg draws."""
    for node in parent:
        if node.tag == "g":
            shift = (node.get("transform") or "translate(0 0)")[10:-1].split()
            _paint(axes, node, dx + float(shift[0]), dy + float(shift[1]))
        elif node.tag == "text":
            x, y = (float(node.get(key) or 0) for key in "xy")
            align = {"end": "right", "middle": "center"}.get(node.get("text-anchor") or "", "left")
            colour = node.get("fill") or "black"
            options = {"ha": align, "color": colour, "fontsize": 10.5, "parse_math": False}
            axes.text(dx + x, dy + y, node.text, **options, zorder=len(axes.get_children()))
        elif node.tag in ("rect", "path"):
            _paint_shape(axes, node, dx, dy)


def _paint_shape(axes: Any, node: Element, dx: float, dy: float) -> None:
    if node.tag == "rect":
        x, y, w, h = (float(node.get(key) or 0) for key in ("x", "y", "width", "height"))
        points, closed = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)], True
    else:
        d = node.get("d") or ""
        closed = d.endswith("Z")
        points = [(float(x), float(y)) for x, y in (pair.split() for pair in d.strip("MZ").split("L"))]
    xs, ys = zip(*((dx + x, dy + y) for x, y in points), strict=True)
    above = len(axes.get_children())  # what comes later lies above, as in SVG
    if closed:
        alpha = float(node.get("fill-opacity") or 1)
        axes.fill(xs, ys, color=node.get("fill"), alpha=alpha, linewidth=0, zorder=above)
        return
    dashes = [float(part) / 2 for part in (node.get("stroke-dasharray") or "").split()]  # of line widths, which are 2
    style: Any = (0, dashes) if dashes else "-"
    width = float(node.get("stroke-width") or 1)
    axes.plot(xs, ys, color=node.get("stroke"), linewidth=width, linestyle=style, zorder=above)
