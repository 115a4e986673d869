"""The paper's parameter counts, from the real architectures (all 40 of them: benchmarks/params.py)."""

import pytest

from benchmarks.params import PAPER, SPARSITIES, count

SMALL = ["deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"]


@pytest.mark.parametrize("name", SMALL)
def test_counts_equal_the_papers_table(name: str) -> None:
    assert [round(count(name, s) / 1e6, 1) for s in SPARSITIES] == list(PAPER[name])
