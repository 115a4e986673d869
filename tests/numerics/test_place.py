"""Where fits are computed: devices of every kind, without having them."""

from __future__ import annotations

import pytest
import torch

from corp.numerics.place import Place, in_float64

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, solves: bool = True) -> None:
    """Let there be a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(Place, "solves", lambda _self: solves)


@pytest.mark.parametrize(
    "capability", [(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)], ids=["P100", "V100", "A100", "H100", "B200"]
)
def test_gpus_of_data_centres_fit_in_float64(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability)
    assert Place.on(CUDA) == (CUDA, torch.float64)


@pytest.mark.parametrize(
    "capability", [(6, 1), (7, 5), (8, 6), (8, 9), (12, 0)], ids=["P40", "T4", "A10", "L4", "RTX50"]
)
def test_other_gpus_fit_in_float32(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, capability)
    assert Place.on(CUDA) == (CUDA, torch.float32)
    assert str(Place.on(CUDA)) == "cuda in float32"


def test_what_cannot_solve_leaves_it_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Place.on(torch.device("meta")) == (CPU, torch.float64)
    pretend(monkeypatch, (8, 0), solves=False)
    assert Place.on(CUDA) == (CPU, torch.float64)


def test_the_cpu_solves_in_both_precisions_and_not_in_half() -> None:
    assert Place.on(CPU) == (CPU, torch.float64)
    assert Place(CPU, torch.float64).solves()
    assert Place(CPU, torch.float32).solves()
    assert not Place(CPU, torch.float16).solves()


def test_sums_are_in_float64_on_every_device_that_has_it() -> None:
    for name in ("cpu", "cuda", "xpu"):
        assert Place.exactly(torch.device(name)) == (torch.device(name), torch.float64)
    for name in ("mps", "meta"):
        assert Place.exactly(torch.device(name)) == (CPU, torch.float64)


def test_a_layer_without_a_bias_has_one_of_zeros() -> None:
    weight, bias = torch.randn(3, 2), torch.randn(3)
    W, b = in_float64(weight, bias)
    assert W.dtype == b.dtype == torch.float64
    assert torch.equal(W.float(), weight)
    assert torch.equal(b.float(), bias)
    assert in_float64(weight, None)[1].tolist() == [0, 0, 0]
