"""Draw the pictures of the documentation: python -m scripts.pictures [--check]

The picture of the result is drawn from beyond.json and peers.json in benchmarks/results, and has to be drawn again when
they change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, tostring

from corp.report.svg import COLOURS, Series, drawing, line_chart, picture

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
LADDER = ROOT / "benchmarks" / "results" / "beyond.json"
PEERS = ROOT / "benchmarks" / "results" / "peers.json"
PAPER = "paper"  # a step of the ladder in the former file
BUDGETS, DEFAULT, MERGED = "tokens and widths", "corp, widths alone", "corp, both"  # sections and methods in the latter
INK, PALE = "#222222", "#eef2f7"


def result() -> Element:
    """Top-1 of DeiT-Tiny against operations: merged tokens, the default and the paper's recipe."""
    ladder = json.loads(LADDER.read_text(encoding="utf-8"))["deit"]
    peers = json.loads(PEERS.read_text(encoding="utf-8"))
    rows = [row for title, some in peers.items() if title.startswith(BUDGETS) for row in some]
    named = {"with merged tokens": MERGED, "the default recipe": DEFAULT}
    points = {name: [(r["macs"], r["top1"]) for r in rows if r["method"] == method] for name, method in named.items()}
    points["the paper's recipe"] = [
        (row[PAPER]["macs"], row[PAPER]["top-1 %"]) for row in ladder.values() if PAPER in row
    ]
    dense = (1.0, peers["dense"]["top1"])
    lines = [Series(name, sorted([dense, *some])) for name, some in points.items()]
    axes = ("operations, share of the dense model's", "top-1 %")
    return picture("DeiT-Tiny, no training after pruning", line_chart("result", lines, axes, "{:.0f}".format))


def flow() -> Element:
    """The steps from batches to a smaller model, as boxes and arrows."""
    steps = [
        ("batches", "unlabelled"),
        ("sums", "means, covariances"),
        ("plan", "widths, folds, costs"),
        ("smaller model", "narrower layers"),
        ("result", "refitted"),
    ]
    verbs = ("calibrate", "plan", "apply", "refit")
    svg = _page("batches, sums, plan, smaller model, result", 132 * len(steps) + 70 * len(verbs) + 20, 96)
    for i, (name, about) in enumerate(steps):
        x = 10 + 202 * i
        _box(svg, x, 26, 132, 48, PALE)
        _text(svg, x + 66, 47, name, weight="bold")
        _text(svg, x + 66, 64, about)
    for i, verb in enumerate(verbs):
        _arrow(svg, 142 + 202 * i + 4, 208 + 202 * i, 50)
        _text(svg, 177 + 202 * i, 40, verb)
    return svg


def fold() -> Element:
    """An MLP before and after: pruned channels are predicted from kept ones, and the prediction moves into W."""
    svg = _page("two of five channels are predicted from the other three and folded into the next layer", 720, 250)
    _network(svg, 20, "dense: W x", (0, 1, 2, 3, 4), pruned=(1, 3))
    _text(svg, 360, 120, "x_P ≈ B x_S + c")
    _arrow(svg, 310, 412, 132)
    _text(svg, 360, 150, "ridge regression")
    _network(svg, 430, "pruned: (W_S + W_P B) x_S + W_P c", (0, 2, 4))
    return svg


def _network(svg: Element, x: float, title: str, channels: Sequence[int], pruned: Sequence[int] = ()) -> None:
    """Inputs, hidden channels at their places, outputs, and the weights between them as lines."""
    _text(svg, x + 130, 16, title, weight="bold")
    ends = [78 + 54 * i for i in range(3)]
    hidden = {i: 52 + 40 * i for i in channels}
    for i, y in hidden.items():
        colour, dash = (COLOURS[2], "3 3") if i in pruned else (COLOURS[0], "")
        for end in ends:
            _line(svg, x + 20, end, x + 130, y, colour, dash)
            _line(svg, x + 130, y, x + 240, end, colour, dash)
    for i, y in hidden.items():
        _dot(svg, x + 130, y, COLOURS[2] if i in pruned else COLOURS[0])
        _text(svg, x + 130, y - 12, "P" if i in pruned else "S")
    for end in ends:
        _dot(svg, x + 20, end, INK)
        _dot(svg, x + 240, end, INK)


def _page(label: str, width: float, height: float) -> Element:
    svg = drawing(label, width, height)
    svg.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "width": f"{width:g}", "height": f"{height:g}"}
    SubElement(svg, "rect", {"width": f"{width:g}", "height": f"{height:g}", "fill": "#ffffff"})
    return svg


def _box(svg: Element, x: float, y: float, width: float, height: float, fill: str) -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    SubElement(svg, "rect", {**place, "rx": "6", "fill": fill, "stroke": COLOURS[0]})


def _text(svg: Element, x: float, y: float, text: str, weight: str = "normal") -> None:
    place = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": "middle", "font-weight": weight, "fill": INK}
    SubElement(svg, "text", place).text = text


def _line(svg: Element, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> None:
    place = {"x1": f"{x1:g}", "y1": f"{y1:g}", "x2": f"{x2:g}", "y2": f"{y2:g}"}
    SubElement(svg, "line", {**place, "stroke": colour, "stroke-opacity": "0.6", "stroke-dasharray": dash})


def _arrow(svg: Element, x1: float, x2: float, y: float) -> None:
    _line(svg, x1, y, x2 - 6, y, INK)
    SubElement(svg, "polygon", {"points": f"{x2:g},{y:g} {x2 - 8:g},{y - 4:g} {x2 - 8:g},{y + 4:g}", "fill": INK})


def _dot(svg: Element, x: float, y: float, colour: str) -> None:
    SubElement(svg, "circle", {"cx": f"{x:g}", "cy": f"{y:g}", "r": "6", "fill": colour})


PICTURES = {"result.svg": result, "flow.svg": flow, "fold.svg": fold}


def drawn(name: str) -> str:
    return tostring(PICTURES[name](), encoding="unicode") + "\n"


def stale() -> list[str]:
    """The pictures that are missing or not what would be drawn now."""
    files = {name: FIGURES / name for name in PICTURES}
    return [name for name, file in files.items() if not file.is_file() or file.read_text("utf-8") != drawn(name)]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale())}; run python -m scripts.pictures" if stale() else 0)
    for file_name in PICTURES:
        (FIGURES / file_name).write_text(drawn(file_name), encoding="utf-8")
