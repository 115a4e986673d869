"""Closeness to the dense model on sequences: what is compared, and what is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corp.measure import closeness
from corp.measure.closeness import Reference


class Encoder(nn.Module):
    """Gives its table's rows; what it gives at padding can be set apart."""

    def __init__(self, padding: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, _weight=torch.arange(40.0).view(10, 4).cos())
        self.padding = padding

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        hidden = self.table(input_ids)
        return SimpleNamespace(last_hidden_state=torch.where(attention_mask[..., None].bool(), hidden, self.padding))


class Speaker(nn.Module):
    """Gives logits (B, n, 10) that differ from another's at one position only."""

    def __init__(self, other: int | None = None) -> None:
        super().__init__()
        self.other, self.unused = other, nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        logits = nn.functional.one_hot(input_ids, 10).float()
        if self.other is not None:
            logits[:, self.other, 0] += 3
        return SimpleNamespace(logits=logits)


def batch(length: int, real: int) -> dict[str, Tensor]:
    ids = (torch.arange(2 * length) % 10).view(2, length)
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < real).long().expand(2, length)}


@pytest.mark.parametrize("length", [20, 300])
def test_features_at_padding_do_not_count_however_long_the_sequences_are(length: int) -> None:
    reference = Reference(Encoder(), [batch(length, real=length // 2)])
    assert reference.compare(Encoder(padding=100.0)).divergence().value == 0


def test_every_position_of_few_sequences_is_compared() -> None:
    reference = Reference(Speaker(), [batch(300, real=300)])
    for position in (0, 1, 149, 299):
        assert reference.compare(Speaker(position)).divergence().value > 0


def test_many_sequences_are_compared_at_some_positions_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closeness, "KEPT", 2 * 10 * 20)  # twenty positions of two sequences over ten words
    reference = Reference(Speaker(), [batch(300, real=200)])
    assert reference.outputs[0].values.shape == (2, 20, 10)
    assert reference.compare(Speaker(15)).divergence().value > 0  # every fifteenth position
    assert reference.compare(Speaker(16)).divergence().value == 0
    assert reference.compare(Speaker(285)).divergence().value == 0  # padding


@pytest.mark.parametrize("obeys", [True, False])
def test_single_logits_are_asked_for_where_a_model_can_compute_them(
    monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    asked: list[int] = []

    class Choosing(Speaker):
        def forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: Any = 0) -> SimpleNamespace:
            logits = super().forward(input_ids, attention_mask).logits
            if isinstance(logits_to_keep, Tensor) and obeys:
                logits = logits[:, logits_to_keep]
            asked.append(logits.shape[1])
            return SimpleNamespace(logits=logits)

    monkeypatch.setattr(closeness, "KEPT", 2 * 10 * 20)
    reference = Reference(Choosing(), [batch(300, real=200)])
    for position in (15, 16, 285):
        alike = reference.compare(Choosing(position)).divergence().value
        assert alike == reference.compare(Speaker(position)).divergence().value
    assert asked == [300, *[20 if obeys else 300] * 3]
