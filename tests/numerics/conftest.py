"""Where and how precisely the numerics run: on the device CORP_TEST_DEVICE (default: cpu), in float64 and float32."""

from __future__ import annotations

import os

import pytest
import torch

from tests.helpers.places import Place


@pytest.fixture(params=[(torch.float64, 1e-8), (torch.float32, 2e-3)], ids=["float64", "float32"])
def place(request: pytest.FixtureRequest) -> Place:
    """Of the 7 digits of float32 the condition of the systems here, up to 1e4, leaves 3."""
    return Place(torch.device(os.environ.get("CORP_TEST_DEVICE", "cpu")), *request.param)
