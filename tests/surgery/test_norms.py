"""The norm of narrowed heads against the dense norm followed by the maps of pairs."""

from __future__ import annotations

import torch
from torch import nn

from corp.numerics.lengths import Length
from corp.numerics.rotary import pair_map
from corp.planning.site_plan import NormFold
from corp.sites import AttentionSite, QKNorm, Rows
from corp.surgery.norms import narrow_norms
from tests.helpers.seeds import seeded

EPS = 1e-3


class _Norm(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def test_corrections_of_pairs_follow_the_gains_of_the_dense_norm() -> None:
    """With the true length in place of a predicted one, the narrow norm is the map of pairs of the dense norm."""
    g = seeded(3)
    gain, kept_pairs = torch.randn(2, 8, generator=g, dtype=torch.float64), torch.tensor([0, 3])
    kept = torch.tensor([0, 3, 4, 7])
    model = nn.ModuleDict({"q": _Norm(gain[0] - 1), "k": _Norm(gain[1] - 1)})
    rows = Rows("x", 0, 16)
    site = AttentionSite("a", rows, rows, 2, None, norm=QKNorm("q", "k", EPS, shift=1.0))
    ab = torch.randn(2, 4, generator=g, dtype=torch.float64)
    x = torch.randn(1, 2, 5, 8, generator=g, dtype=torch.float64)
    x[..., [1, 2, 5, 6]] = x[..., [0, 0, 3, 4]]  # so that the length follows exactly from kept dimensions
    v = torch.tensor([3.0, 2.0, 2.0, 1.0], dtype=torch.float64)
    exact = Length(v, torch.tensor(EPS, dtype=torch.float64))
    norms = narrow_norms(model, site, [kept, kept], NormFold(tuple(ab), (exact,) * 2, (exact,) * 2))
    length = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    for norm, which, corrections in ((norms[0], gain[0], ab), (norms[1], gain[1], [None, None])):
        for h, one in enumerate(corrections):
            expected = (which * x[:, h] / length[:, h]) @ pair_map(kept_pairs, 8, one).mT
            torch.testing.assert_close(norm(x[..., kept])[:, h], expected)
