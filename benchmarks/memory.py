"""What the statistics of known architectures need in memory and on disk, from their shapes.

python -m benchmarks.memory
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from corp.calibration.memory import human, site_bytes
from corp.io.tables import markdown_table
from corp.numerics.linalg import packed_size
from corp.sites import AttentionSite, MLPSite, Rotary, Rows
from corp.surgery.attention import PackedAttention

RESULTS = Path(__file__).parent / "results"


class Shape(NamedTuple):
    """Layers, MLP width, heads and head width."""

    layers: int
    hidden: int
    heads: int
    width: int
    rotary: bool = False


SHAPES = {
    "DeiT-T": Shape(12, 768, 3, 64),
    "DeiT-S": Shape(12, 1536, 6, 64),
    "DeiT-B": Shape(12, 3072, 12, 64),
    "DeiT-L": Shape(24, 4096, 16, 64),
    "DeiT-H": Shape(32, 5120, 16, 80),
    "OPT-1.3B": Shape(24, 8192, 32, 64),
    "Llama 7B": Shape(32, 11008, 32, 128, rotary=True),
}


def row(name: str, shape: Shape) -> tuple[str, ...]:
    mlp = MLPSite("mlp", (Rows("up", 0, shape.hidden),), "down")
    side = Rows("qk", 0, shape.heads * shape.width)
    rotated = Rotary(shape.width) if shape.rotary else None
    causal = shape.rotary or name.startswith("OPT")
    attention = AttentionSite("attn", side, side, shape.heads, PackedAttention, causal=causal, rotary=rotated)
    cells = [human(shape.layers * site_bytes(mlp, None))]
    for samples in (128, 1000, None):
        cells.append(human(shape.layers * site_bytes(attention, samples)))
    on_disk = 2 * 8 * packed_size(shape.hidden) * shape.layers
    cells.append(human(on_disk + shape.layers * site_bytes(attention, 1000)))
    least = max(site_bytes(mlp, 1000), site_bytes(attention, 1000))
    return name, *cells, human(least + 4 * shape.hidden**2 + 8 * 4096 * shape.hidden)


def main() -> None:
    columns = (
        "model", "MLPs", "Q/K, 128 samples", "Q/K, 1,000 samples", "Q/K, any number", "disk, 1,000 samples",
        "least memory, 1,000 samples",
    )  # fmt: skip
    table = markdown_table(columns, [row(name, shape) for name, shape in SHAPES.items()])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()
