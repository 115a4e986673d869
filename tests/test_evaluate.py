"""Scores against loops."""

import pytest
import torch
from corp.evaluate.classify import Score, compare
from torch import nn


def test_scores_equal_a_loop_over_samples() -> None:
    torch.manual_seed(0)
    dense, other = torch.randn(40, 9), torch.randn(40, 9)
    labels = torch.randint(0, 9, (40,))
    score = Score()
    score.add(other[:15], dense[:15], labels[:15])
    score.add(other[15:], dense[15:], labels[15:])
    p, q = dense.double().softmax(1), other.double().softmax(1)
    kl = sum(float((p[i] * (p[i] / q[i]).log()).sum()) for i in range(40)) / 40
    assert score.kl == pytest.approx(kl)
    assert score.agreement == sum(int(dense[i].argmax() == other[i].argmax()) for i in range(40)) / 40
    assert score.top1 == sum(int(other[i].argmax() == labels[i]) for i in range(40)) / 40
    assert score.top5 == sum(int(labels[i]) in other[i].argsort(descending=True)[:5].tolist() for i in range(40)) / 40


def test_a_model_agrees_with_itself_and_needs_no_labels() -> None:
    model = nn.Linear(4, 3)
    score = compare(model, [model], [torch.randn(5, 4), torch.randn(2, 4)])[0]
    assert (score.samples, score.agreement, score.top1) == (7, 1.0, None)
    assert score.kl == pytest.approx(0.0, abs=1e-9)
