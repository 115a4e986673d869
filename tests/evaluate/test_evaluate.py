"""Metrics, intervals, features and targets against loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import corp
from corp.evaluate.classify import Score
from corp.evaluate.features import Features, Likeness, tapped
from corp.evaluate.run import Contender, judged, side_by_side
from corp.measure.intervals import Interval, Mean, paired_difference, wilson
from tests.helpers.models import build, images
from tests.helpers.seeds import seed


def test_scores_equal_a_loop_over_samples() -> None:
    dense, other = torch.randn(40, 9), torch.randn(40, 9)
    labels = torch.randint(0, 9, (40,))
    score = Score()
    score.add(other[:15], dense[:15], labels[:15])
    score.add(other[15:], dense[15:], labels[15:])
    p, q = dense.double().softmax(1), other.double().softmax(1)
    kl = [float((p[i] * (p[i] / q[i]).log()).sum()) for i in range(40)]
    right = [int(other[i].argmax() == labels[i]) for i in range(40)]
    before = [int(dense[i].argmax() == labels[i]) for i in range(40)]
    values = {name: interval.value for name, interval in score.intervals().items() if interval}
    assert values["kl"] == pytest.approx(np.mean(kl))
    assert values["agreement"] == sum(int(dense[i].argmax() == other[i].argmax()) for i in range(40)) / 40
    assert values["top1"] == sum(right) / 40
    assert (
        values["top5"] == sum(int(labels[i]) in other[i].argsort(descending=True)[:5].tolist() for i in range(40)) / 40
    )
    spread = 1.96 * np.std(kl, ddof=1) / 40**0.5
    assert score.intervals()["kl"] == pytest.approx((np.mean(kl), np.mean(kl) - spread, np.mean(kl) + spread))
    difference = score.intervals()["top1_difference"]
    assert difference is not None
    assert difference.value == pytest.approx(np.mean(right) - np.mean(before))


def test_a_model_agrees_with_itself_and_needs_no_labels() -> None:
    model = nn.Linear(4, 3)
    (score,) = judged([model], Score, [torch.randn(5, 4), torch.randn(2, 4)], model)
    found = score.intervals()
    assert found["agreement"] is not None
    assert found["kl"] is not None
    assert (score.divergence.n, found["agreement"].value, found["top1"]) == (7, 1.0, None)
    assert found["kl"].value == pytest.approx(0.0, abs=1e-9)


def test_without_a_dense_model_there_is_only_accuracy() -> None:
    score = Score()
    side_by_side(None, [Contender(nn.Linear(3, 3), score)], [(torch.randn(6, 3), torch.zeros(6))])
    measured = score.intervals()
    assert measured["top1"] is not None
    assert measured["agreement"] is measured["kl"] is measured["top1_difference"] is None


def test_what_cannot_be_scored_is_said() -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(corp.CorpError, match="3 classes and the dense model 4"):
        Score().add(logits, torch.zeros(2, 4))
    with pytest.raises(corp.CorpError, match="label 3 is not one of the model's 3 classes"):
        Score().add(logits, None, torch.tensor([0, 3]))
    with pytest.raises(corp.CorpError, match="not finite"):
        Score().add(logits / 0)
    with pytest.raises(corp.CorpError, match="no batches"):
        judged([], Score, [], nn.Linear(3, 3))


def ends(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None
    assert interval.high is not None
    return interval.low, interval.high


def test_wilson_solves_the_score_equation() -> None:
    for hits, n in [(0, 10), (3, 10), (10, 10), (791, 1000)]:
        value, (low, high) = hits / n, ends(wilson(hits, n))
        assert 0 <= low <= value <= high <= 1
        for end in (low, high):  # the ends are where |p̂ - p| is 1.96 standard errors of p, or the edge of [0, 1]
            assert abs(value - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / n), abs=1e-9)


def test_intervals_cover_the_truth_about_95_times_in_100() -> None:
    rng = random.Random(seed())
    n, runs = 150, 1500
    inside = {"wilson": 0, "paired": 0, "mean": 0}
    for _ in range(runs):
        draws = [rng.random() for _ in range(n)]
        # Right for both 70 %, only for the first 4 %, only for the second 10 %.
        gained, lost = sum(d < 0.04 for d in draws), sum(0.04 <= d < 0.14 for d in draws)
        mean = Mean()
        values = torch.tensor(draws, dtype=torch.float64).exp()
        mean.add(values[:40])
        mean.add(values[40:])
        cases = {
            "wilson": (wilson(sum(d < 0.8 for d in draws), n), 0.8),
            "paired": (paired_difference(gained, lost, n), -0.06),
            "mean": (mean.interval(), math.e - 1),
        }
        for name, (interval, truth) in cases.items():
            low, high = ends(interval)
            inside[name] += low <= truth <= high
    assert all(0.93 <= count / runs <= 0.97 for count in inside.values()), inside


def test_intervals_are_mapped_and_written_end_by_end() -> None:
    assert Interval(0.0, -1.0, 1.0).map(math.exp) == (1.0, math.exp(-1), math.e)
    assert f"{Interval(2.0, 1.5, 2.25):.1f}" == "2.0 [1.5, 2.2]"
    assert f"{Interval(2.0, None, None).map(math.sqrt):.3f}" == "1.414"


def test_small_samples_are_not_certain() -> None:
    low, high = ends(paired_difference(0, 0, 20))
    assert low < -0.05 < 0.05 < high
    mean = Mean()
    mean.add(torch.tensor([2.0]))
    assert mean.interval() == (2.0, None, None)


def test_likeness_equals_a_loop_over_tokens() -> None:
    dense, other = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(3, 4, 5, dtype=torch.float64)
    likeness = Likeness()
    likeness.add(dense[:1], other[:1])
    likeness.add(dense[1:], other[1:])
    pairs = [(dense[i, j], other[i, j]) for i in range(3) for j in range(4)]
    cosines = [float(a @ b / (a @ a).sqrt() / (b @ b).sqrt()) for a, b in pairs]
    assert likeness.cosine == pytest.approx(np.mean(cosines))
    error, energy = sum(float((a - b) @ (a - b)) for a, b in pairs), sum(float(a @ a) for a, _ in pairs)
    assert likeness.relative_error == pytest.approx((error / energy) ** 0.5)


@pytest.mark.parametrize("family", ["vit", "deit-distilled", "dinov2-registers", "siglip", "relative-position"])
def test_every_block_and_the_final_features_are_compared(family: str) -> None:
    dense, batches = build(family), images(2, 8)
    pruned = corp.prune(dense, images(3, 50), corp.Recipe.paper(mlp=0.5, attn=0.5)).model
    features = Features()
    side_by_side(dense, [Contender(pruned, features=features)], batches)
    assert set(features.parts) == {"final", "blocks.0", "blocks.1"}
    with torch.no_grad():
        a, b = (torch.cat([model.forward_features(x) for x in batches]) for model in (dense, pruned))
    final = features.parts["final"]
    assert final.relative_error == pytest.approx(float((a - b).norm() / a.norm()))
    assert final.cosine == pytest.approx(float(torch.cosine_similarity(a, b, dim=-1).mean()))
    assert features.unlike == {}
    last: list[Tensor] = []
    for model in (dense, pruned):
        model.blocks[1].register_forward_hook(lambda _module, _inputs, output: last.append(output.detach()))
        model(torch.cat(batches))
    assert features.parts["blocks.1"].relative_error == pytest.approx(
        float((last[0] - last[1]).norm() / last[0].norm())
    )


def test_taps_leave_no_trace_even_after_an_error() -> None:
    model = build("vit")
    calls = []
    with pytest.raises(corp.CorpError), tapped(model, lambda name, _: calls.append(name)):
        raise corp.CorpError
    model(images(1, 1)[0])
    assert calls == []
    assert "forward_features" not in vars(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_parts_of_other_shapes_are_named_not_compared() -> None:
    features = Features()
    features.add("blocks.0", torch.zeros(2, 3, 4), torch.zeros(2, 3, 5))
    features.add("blocks.1", None, torch.zeros(2, 3, 5))
    assert features.unlike == {"blocks.0": "shape (3, 5), dense (3, 4)", "blocks.1": "the dense model has none"}
    assert features.parts == {}


def test_models_come_back_in_the_mode_they_came_in() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).train()
    (score,) = judged([model], Score, [torch.randn(4, 3)], model)
    assert score.agreeing == 4
    assert model.training
    assert model[1].training
