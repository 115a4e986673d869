"""Lengths under QK-norm, predicted from kept dimensions: against least squares on the tokens themselves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from corp.numerics.lengths import Length, fit_length, length_features, relative_error, square_error
from tests.helpers.seeds import seeded

EPS = 1e-3
KEPT = torch.tensor([0, 2, 3])


def heads(n: int = 400, d: int = 6) -> Tensor:
    """(n, d), correlated, of very different lengths."""
    g = seeded(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64) @ torch.randn(d, d, generator=g, dtype=torch.float64)
    return x * torch.rand(n, 1, generator=g, dtype=torch.float64).mul(3).exp()


def sums(x: Tensor) -> Tensor:
    f = length_features(x, EPS)
    return f.mT @ f


def direct_ratio(x: Tensor, length: Length) -> Tensor:
    """s' / s of every token, by the definition."""
    s = x.square().mean(1) + EPS
    return ((x[:, KEPT].square() * length.v).sum(1) / x.shape[1] + length.c) / s


def test_the_dense_norm_is_one_for_every_token() -> None:
    f = length_features(heads(), EPS)
    torch.testing.assert_close(f[:, :-1].sum(1) + EPS * f[:, -1], torch.ones(400, dtype=torch.float64))


def test_the_error_is_that_of_the_tokens() -> None:
    x = heads()
    length = Length(torch.tensor([1.5, 2.0, 1.0], dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64))
    measured = (direct_ratio(x, length) - 1).square().mean()
    torch.testing.assert_close(torch.tensor(square_error(sums(x), KEPT, length, EPS)).double(), measured)
    small = square_error(sums(x), KEPT, fit_length(sums(x), KEPT, EPS, ridge=0), EPS)
    true = (direct_ratio(x, fit_length(sums(x), KEPT, EPS, ridge=0)).sqrt() - 1).square().mean().sqrt()
    assert abs(relative_error(small) - float(true)) < 0.3 * float(true)


def test_the_fit_equals_brute_force_least_squares_where_no_bound_acts() -> None:
    """On the tokens: (v - 1) and (c - eps) predict the pruned share, with rows for the ridge around their mean."""
    x, ridge = heads(), 0.05
    f = length_features(x, EPS)
    inputs = torch.cat([f[:, KEPT], f[:, -1:]], 1)
    target = f[:, torch.tensor([1, 4, 5])].sum(1, keepdim=True)
    level = f[:, KEPT].square().sum(0).mean()
    around = torch.cat([torch.eye(3) - 1 / 3, torch.zeros(3, 1)], 1).double() * (ridge * level).sqrt()
    rows = torch.cat([inputs, around]), torch.cat([target, torch.zeros(3, 1, dtype=torch.float64)])
    found = torch.linalg.lstsq(*rows).solution[:, 0]
    assert (found > 0).all()  # no bound acts
    fit = fit_length(sums(x), KEPT, EPS, ridge=ridge)
    torch.testing.assert_close(fit.v, 1 + found[:3], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(fit.c, EPS + found[3], rtol=1e-5, atol=1e-8)


def test_bounds_are_kept_and_a_kept_head_is_never_longer_than_a_dense_one() -> None:
    x = heads()
    x[:, 1] = 0.1 / (0.1 + x[:, 0].abs())  # falls as a kept dimension rises: least squares would subtract
    x[:, 4:] = 0
    fit = fit_length(sums(x), KEPT, EPS, ridge=1e-3)
    assert (fit.v >= 1).all()
    assert fit.c >= EPS
    s = (x[:, KEPT].square() * fit.v).sum(1) / 6 + fit.c
    assert (x[:, KEPT].square().sum(1) / s <= 6).all()


def test_nothing_is_lost_when_pruned_squares_follow_from_kept_ones() -> None:
    x = heads()
    x[:, 1], x[:, 4], x[:, 5] = 2 * x[:, 0], x[:, 2] / 2, 0.3
    fit = fit_length(sums(x), KEPT, EPS, ridge=0)
    torch.testing.assert_close(direct_ratio(x, fit), torch.ones(400, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fit.v, torch.tensor([5.0, 1.25, 1.0]).double(), rtol=1e-3, atol=1e-3)
    assert square_error(sums(x), KEPT, fit, EPS) < 1e-8


def test_keeping_everything_is_the_dense_norm() -> None:
    fit = fit_length(sums(heads()), torch.arange(6), EPS, ridge=1e-3)
    torch.testing.assert_close(fit.v, torch.ones(6, dtype=torch.float64))
    torch.testing.assert_close(float(fit.c), EPS)


def test_dead_dimensions_and_constant_lengths_do_not_break_the_fit() -> None:
    x = heads()
    x = x / x.square().mean(1, keepdim=True).sqrt()
    x[:, 3] = 0
    fit = fit_length(sums(x), KEPT, EPS, ridge=0)
    assert torch.isfinite(fit.v).all()
    assert square_error(sums(x), KEPT, fit, EPS) < 0.5


def test_where_all_that_is_kept_is_dead_the_mean_share_of_the_rest_is_the_prediction() -> None:
    x = heads()
    x[:, KEPT] = 0
    fit = fit_length(sums(x), KEPT, EPS, ridge=1e-3)
    torch.testing.assert_close(fit.v, torch.ones(3, dtype=torch.float64))
    f = length_features(x, EPS)
    pruned, constant = f[:, :-1].sum(1), f[:, -1]
    torch.testing.assert_close(fit.c, EPS + (pruned @ constant) / (constant @ constant), rtol=1e-6, atol=0.0)


def test_without_tokens_the_length_is_that_of_the_kept_dimensions() -> None:
    nothing = torch.zeros(7, 7, dtype=torch.float64)
    fit = fit_length(nothing, KEPT, EPS, ridge=1e-3)
    assert fit.v.tolist() == [1, 1, 1]
    assert float(fit.c) == EPS
    assert square_error(nothing, KEPT, fit, EPS) == 0


def test_what_is_at_its_bound_leaves_the_best_to_the_others() -> None:
    """Against all choices of what is at its bound: the fit is the best of those that keep every bound."""
    x = heads()
    x[:, 1] = 0.1 / (0.1 + x[:, 0].abs())
    x[:, 4:] = 0
    F = sums(x)
    fit = fit_length(F, KEPT, EPS, ridge=0)
    least = square_error(F, KEPT, fit, EPS)
    f = length_features(x, EPS)
    inputs, target = torch.cat([f[:, KEPT], f[:, -1:]], 1), f[:, [1, 4, 5]].sum(1, keepdim=True)
    errors = []
    for free in product([False, True], repeat=4):
        chosen = inputs[:, torch.tensor(free)]
        w = torch.linalg.lstsq(chosen, target).solution
        if bool((w >= 0).all()):
            errors.append(float((target - chosen @ w).square().mean()))
    assert int((fit.v == 1).sum() + (fit.c == EPS)) > 0
    assert least == pytest.approx(min(errors), rel=1e-4)


def test_features_of_half_precision_are_in_float32() -> None:
    x = heads()
    assert length_features(x, EPS).dtype == torch.float64
    assert length_features(x.half(), EPS).dtype == torch.float32
    assert length_features(x.float(), EPS).dtype == torch.float32


def test_features_are_those_of_every_head_of_a_batch() -> None:
    x = heads()
    torch.testing.assert_close(length_features(x.view(4, 5, 20, 6), EPS).flatten(0, 2), length_features(x, EPS))


def test_neither_the_fit_nor_its_error_depends_on_how_much_tokens_weigh() -> None:
    F, length = sums(heads()), Length(torch.ones(3, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64))
    assert square_error(1e-6 * F, KEPT, length, EPS) == pytest.approx(square_error(F, KEPT, length, EPS))
    one, other = (fit_length(weight * F, KEPT, EPS, ridge=1e-3) for weight in (1, 1e-6))
    torch.testing.assert_close((other.v, other.c), (one.v, one.c))
