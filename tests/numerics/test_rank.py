"""Ranking, against loops over channels and samples."""

import pytest
import torch

from corp.numerics import rank


@pytest.fixture
def tokens() -> torch.Tensor:  # (200, 6), unequal scales, mean != 0
    return torch.randn(200, 6, dtype=torch.float64) * torch.arange(1, 7) + torch.tensor([3.0, 0, -2, 0, 1, 0])


@pytest.mark.parametrize("name", ["activation", "magnitude", "combined", "active", "wanda", "variance", "fluctuation"])
def test_mlp_scores_equal_a_loop_over_channels(tokens: torch.Tensor, name: str) -> None:
    W = torch.randn(4, 6, dtype=torch.float64)
    expected = []
    for i in range(6):
        energy = sum(float(t[i]) ** 2 for t in tokens) / len(tokens)
        norm = sum(float(w) ** 2 for w in W[:, i]) ** 0.5
        active = sum(abs(float(t[i])) > 1.5 for t in tokens) / len(tokens)
        mean = sum(float(t[i]) for t in tokens) / len(tokens)
        variance = sum((float(t[i]) - mean) ** 2 for t in tokens) / len(tokens)
        scores = {"activation": energy, "magnitude": norm, "combined": energy * norm, "active": active}
        scores |= {"wanda": energy**0.5 * norm, "variance": variance, "fluctuation": variance * norm**2}
        expected.append(scores[name])
    energy, variance = tokens.square().mean(0), tokens.var(0, correction=0)
    share = (tokens.abs() > 1.5).double().mean(0)
    found = rank.mlp_scores(name, energy, variance, share, W)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_top_keeps_the_highest_and_breaks_ties_by_index() -> None:
    kept, pruned = rank.top(torch.tensor([1.0, 5.0, 1.0, 7.0, 1.0]), 3)
    assert kept.tolist() == [0, 1, 3]
    assert pruned.tolist() == [2, 4]


def test_unknown_ranking_is_an_error(tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="nonsense"):
        rank.mlp_scores("nonsense", tokens[0], tokens[0], tokens[0], tokens)


def test_of_many_equal_scores_the_first_are_kept() -> None:
    kept, pruned = rank.top(torch.ones(200), 80)
    assert kept.tolist() == list(range(80))
    assert pruned.tolist() == list(range(80, 200))
