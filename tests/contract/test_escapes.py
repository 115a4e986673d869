"""What a site's layers make may reach its own consuming layer only, however little of it shows at the model's end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import corp
from tests.helpers.seeds import seed_all, seeded

D = 16


class Leaking(nn.Module):
    """An MLP whose hidden channels another layer takes too, and adds next to nothing."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.fc1, self.fc2, self.aside = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Linear(4 * D, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        out: Tensor = x + self.fc2(hidden) + self.share * self.aside(hidden).mean(-1, keepdim=True)
        return out


@pytest.mark.parametrize("share", [1.0, 1e-4])
def test_hidden_channels_that_another_layer_takes_are_refused(share: float) -> None:
    seed_all(0)
    model = nn.Sequential(Leaking(share), Leaking(share))
    found = corp.find_sites(model, torch.randn(4, 5, D, generator=seeded(1)))
    assert not found.mlp
    assert all("something besides its own layer uses what it makes" in refusal.reason for refusal in found.refused)
    assert {refusal.kind for refusal in found.refused} == {"mlp"}
