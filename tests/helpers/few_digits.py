"""The built-in digits with fewer images to calibrate on, for pages and examples that are about how it is done."""

from __future__ import annotations

import pytest
from torch import nn

from corp.data import digits

IMAGES = 384  # three batches of 128: one of them is held out where widths are searched


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digits.load_split()
    few = whole._replace(train_images=whole.train_images[:IMAGES], train_labels=whole.train_labels[:IMAGES])
    monkeypatch.setattr(digits, "load_split", lambda: few)


def cut(monkeypatch: pytest.MonkeyPatch, blocks: int = 2) -> None:
    """Leave the built-in model its first blocks alone, where its answers do not matter."""
    load = digits.load_model

    def shallow() -> nn.Module:
        model = load()
        model.blocks = model.blocks[:blocks]
        return model

    monkeypatch.setattr(digits, "load_model", shallow)
