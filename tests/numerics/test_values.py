"""Bases of values: against regressions on the tokens themselves, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from corp.numerics import values
from corp.numerics.values import Basis
from tests.helpers.seeds import seeded

HEADS, WIDTH, OUT = 3, 4, 6
D = HEADS * WIDTH


@pytest.fixture
def tokens() -> Tensor:  # (300, D), correlated within and between heads, mean 0
    x = torch.randn(300, D, generator=seeded(1), dtype=torch.float64)
    x = x @ torch.randn(D, D, generator=seeded(2), dtype=torch.float64)
    return x - x.mean(0)


@pytest.fixture
def W() -> Tensor:
    return torch.randn(OUT, D, generator=seeded(3), dtype=torch.float64)


def cov_of(x: Tensor) -> Tensor:
    return x.mT @ x / len(x)


def split(x: Tensor) -> list[Tensor]:
    """The columns of every head."""
    return list(x.split(WIDTH, 1))


def unexplained(y: Tensor, x: Tensor) -> Tensor:
    """What least squares on x leaves of y."""
    return y - x @ torch.linalg.lstsq(x, y).solution


def least_error(y: Tensor, x: Tensor, given: Tensor | None, keep: int) -> float:
    """The least that any `keep` directions of x, together with all of `given`, leave of y (reduced-rank regression)."""
    if given is not None:
        y, x = unexplained(y, given), unexplained(x, given)
    part = y - unexplained(y, x)
    return float(y.square().sum() - torch.linalg.svdvals(part)[:keep].square().sum())


def directions(x: Tensor, basis: Basis, head: int, keep: int) -> Tensor:
    """What the first directions of one head are for every token."""
    return split(x)[head] @ basis.to[head, :keep].mT


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_of_one_head_alone_the_leading_directions_are_the_best(keep: int, tokens: Tensor, W: Tensor) -> None:
    x, W_h = split(tokens)[0], split(W)[0]
    basis = values.value_basis(W_h, cov_of(x), 1, 1, keep, ridge=0.0)
    left = unexplained(x @ W_h.mT, x @ basis.to[0, :keep].mT)
    assert float(left.square().sum()) == pytest.approx(least_error(x @ W_h.mT, x, None, keep), rel=1e-4)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_head_keeps_the_best_given_what_the_others_keep(keep: int, tokens: Tensor, W: Tensor) -> None:
    basis = values.value_basis(W, cov_of(tokens), HEADS, HEADS, keep, ridge=0.0)
    others = torch.cat([directions(tokens, basis, h, keep) for h in range(HEADS - 1)], 1)
    left = unexplained(tokens @ W.mT, torch.cat([others, directions(tokens, basis, HEADS - 1, keep)], 1))
    best = least_error(tokens @ W.mT, split(tokens)[-1], others, keep)
    assert float(left.square().sum()) == pytest.approx(best, rel=1e-3)


def test_every_head_is_chosen_given_the_heads_before_and_the_start_of_those_behind(tokens: Tensor, W: Tensor) -> None:
    keep = 2
    start = values.value_basis(W, cov_of(tokens), HEADS, HEADS, WIDTH, ridge=0.0)
    basis = values.value_basis(W, cov_of(tokens), HEADS, HEADS, keep, ridge=0.0)
    for h in range(HEADS):
        others = [directions(tokens, basis if g < h else start, g, keep) for g in range(HEADS) if g != h]
        given = torch.cat(others, 1)
        left = unexplained(tokens @ W.mT, torch.cat([given, directions(tokens, basis, h, keep)], 1))
        best = least_error(tokens @ W.mT, split(tokens)[h], given, keep)
        assert float(left.square().sum()) == pytest.approx(best, rel=1e-3)


def test_where_everything_is_kept_heads_are_ordered_each_by_itself(tokens: Tensor, W: Tensor) -> None:
    basis = values.value_basis(W, cov_of(tokens), HEADS, HEADS, WIDTH, ridge=1e-3)
    for h, (x, W_h) in enumerate(zip(split(tokens), split(W), strict=True)):
        alone = values.value_basis(W_h, cov_of(x), 1, 1, WIDTH, ridge=1e-3)
        torch.testing.assert_close(basis.to[h].abs(), alone.to[0].abs())  # a direction's sign is free
        torch.testing.assert_close(basis.back[h].abs(), alone.back[0].abs())


@pytest.mark.parametrize("keep", [2, WIDTH])
def test_directions_of_a_head_are_uncorrelated_and_can_be_undone(keep: int, tokens: Tensor, W: Tensor) -> None:
    basis = values.value_basis(W, cov_of(tokens), HEADS, HEADS, keep, ridge=0.0)
    eye = torch.eye(WIDTH, dtype=torch.float64)
    for h, x in enumerate(split(tokens)):
        torch.testing.assert_close(basis.to[h] @ basis.back[h], eye)
        torch.testing.assert_close(basis.to[h] @ cov_of(x) @ basis.to[h].mT, eye, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keep", [2, WIDTH])
def test_heads_that_share_values_lose_what_each_would_lose(keep: int, tokens: Tensor, W: Tensor) -> None:
    """Query heads with independent values of one distribution are the same as one head with both their outputs."""
    second = torch.randn(OUT, D, generator=seeded(4), dtype=torch.float64)
    cov = cov_of(tokens)
    alone = values.value_basis(torch.cat([W, second]), cov, HEADS, HEADS, keep, ridge=1e-3)
    blocks = cov.view(HEADS, 1, WIDTH, HEADS, 1, WIDTH) * torch.eye(2, dtype=torch.float64).view(1, 2, 1, 1, 2, 1)
    both = torch.stack([W.view(OUT, HEADS, WIDTH), second.view(OUT, HEADS, WIDTH)], 2).reshape(OUT, 2 * D)
    shared = values.value_basis(both, blocks.reshape(2 * D, 2 * D), 2 * HEADS, HEADS, keep, ridge=1e-3)
    torch.testing.assert_close(shared.to.abs(), alone.to.abs())


@pytest.mark.parametrize("groups", [3, 1])
def test_the_layer_does_the_same_in_another_basis(groups: int, tokens: Tensor, W: Tensor) -> None:
    to = torch.randn(groups, WIDTH, WIDTH, generator=seeded(5), dtype=torch.float64)
    x = tokens + torch.arange(D)
    mean = x.mean(0)
    found = values.rotate(W, mean, cov_of(x - mean), Basis(to, torch.linalg.inv(to)), HEADS)
    rotated = torch.cat([part @ to[h * groups // HEADS].mT for h, part in enumerate(split(x))], 1)
    torch.testing.assert_close(found.mean, rotated.mean(0))
    torch.testing.assert_close(found.cov, torch.cov(rotated.mT, correction=0))
    torch.testing.assert_close(rotated @ found.W.mT, x @ W.mT)


def test_kept_inputs_are_counted_over_all_query_heads() -> None:
    kept = [torch.tensor([0, 3]), torch.tensor([1, 2])]
    assert values.kept_inputs(kept, 4, 2).tolist() == [0, 3, 5, 6]
    assert values.kept_inputs(kept, 4, 4).tolist() == [0, 3, 4, 7, 9, 10, 13, 14]
