"""Metrics, intervals, features and targets against loops."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import corp
from corp.data.dense import DensePairs, find_pairs, read_target, whole_image
from corp.evaluate.classify import Score
from corp.evaluate.dense import Depth, Segmentation, evaluate_head, patch_map
from corp.evaluate.features import Features, Likeness, tapped
from corp.evaluate.run import Contender, judged, side_by_side
from corp.measure.intervals import Interval, Mean, paired_difference, wilson
from tests.helpers.models import build, images


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
    with pytest.raises(corp.CorpError, match="3 classes apart, the dense model 4"):
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
    rng = random.Random(0)
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


def test_depth_equals_a_loop_over_pixels() -> None:
    prediction = torch.rand(3, 1, 4, 5) * 3 - 0.3  # some below zero
    target = torch.rand(3, 4, 5) * 3
    target[0, 0, 0], target[1, 2, 3], target[2, 1, 1] = 0.0, -1.0, float("nan")  # no depth there
    metric = Depth()
    metric.add(prediction[:1], target[:1])
    metric.add(prediction[1:], target[1:])
    squares, near = [], []
    for p, t in zip(prediction.flatten().tolist(), target.flatten().tolist(), strict=True):
        if t > 0:
            squares.append((p - t) ** 2)
            near.append(p > 0 and max(p / t, t / p) < 1.25)
    assert len(squares) == 57
    assert metric.result() == pytest.approx({"rmse": np.mean(squares) ** 0.5, "delta1": np.mean(near)}, rel=1e-5)


def test_miou_equals_sets_of_pixels() -> None:
    logits, target = torch.randn(3, 5, 6, 6), torch.randint(0, 4, (3, 6, 6))
    logits[:, 4] = -9  # class 4 is neither there nor predicted
    target[0, :2] = 255
    metric = Segmentation(5)
    metric.add(logits[:2], target[:2])
    metric.add(logits[2:], target[2:])
    counted = [i for i, t in enumerate(target.flatten().tolist()) if t != 255]
    predicted = logits.argmax(1).flatten().tolist()
    ratios = []
    for k in range(4):
        there = {i for i in counted if target.flatten()[i] == k}
        found = {i for i in counted if predicted[i] == k}
        ratios.append(len(there & found) / len(there | found))
    assert metric.result()["miou"] == pytest.approx(np.mean(ratios))


def test_odd_dense_targets_and_heads_are_errors() -> None:
    with pytest.raises(corp.CorpError, match="label 7 is not one of 3 classes"):
        Segmentation(3).add(torch.zeros(1, 3, 2, 2), torch.full((1, 2, 2), 7))
    with pytest.raises(corp.CorpError, match="head gives 4 classes, 3 were announced"):
        Segmentation(3).add(torch.zeros(1, 4, 2, 2), torch.zeros(1, 2, 2))
    with pytest.raises(corp.CorpError, match="one channel, this one 2"):
        Depth().add(torch.zeros(1, 2, 2, 2), torch.ones(1, 2, 2))
    with pytest.raises(corp.CorpError, match="not finite"):
        Depth().add(torch.full((1, 1, 2, 2), math.inf), torch.ones(1, 2, 2))
    with pytest.raises(corp.CorpError, match="no pixel has a depth"):
        Depth().result()
    with pytest.raises(corp.CorpError, match="no pixel has a label"):
        Segmentation(3).result()
    with pytest.raises(corp.CorpError, match="no forward_features"):
        patch_map(nn.Linear(2, 2), torch.zeros(1, 3, 4, 4))
    with pytest.raises(corp.CorpError, match="no pairs"):
        evaluate_head(nn.Linear(2, 2), nn.Identity(), [], Depth())


class Pixels(nn.Module):
    """A backbone whose patch tokens are the pixels themselves, behind two prefix tokens."""

    num_prefix_tokens = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward_features(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # (B, h w, 3)
        return torch.cat([torch.full_like(tokens[:, :2], 9.0), tokens], 1) * self.scale


def test_the_map_of_patches_is_the_image_also_when_it_is_not_square() -> None:
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(patch_map(Pixels(), x), x)
    backbone = build("dinov2-registers")
    assert patch_map(backbone, images(1, 2)[0]).shape == (2, 24, 4, 4)
    Pixels.num_prefix_tokens = 1
    try:
        with pytest.raises(corp.CorpError, match="do not fill a grid"):
            patch_map(Pixels(), x)
    finally:
        Pixels.num_prefix_tokens = 2


@pytest.mark.parametrize("parallel", [False, True])
def test_a_folder_of_images_and_targets_goes_through_backbone_and_head(tmp_path: Path, parallel: bool) -> None:
    inputs, targets = tmp_path / "in" / "a", tmp_path / ("out" if parallel else "in") / "a"
    inputs.mkdir(parents=True)
    targets.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(30, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(inputs / f"{i}.bmp")
        np.save(targets / f"{i}.npy", pixels[..., 0].astype(np.float32) / 255)
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(targets / "2.png")  # .npy comes first
    pairs = find_pairs(tmp_path / "in", tmp_path / "out" if parallel else None)
    assert [(image.name, target.name) for image, target in pairs] == [(f"{i}.bmp", f"{i}.npy") for i in range(3)]
    red = nn.Conv2d(3, 1, 1, bias=False)
    nn.init.constant_(red.weight, 0.0)
    red.weight.data[0, 0] = 1.0  # knows the answer: the red channel
    loaded = DensePairs(pairs, whole_image((4, 4), (0.0,) * 3, (1.0,) * 3), batch_size=2)
    assert [len(x) for x, _ in loaded] == [2, 1]
    assert evaluate_head(Pixels(), red, loaded, Depth()).result() == pytest.approx({"rmse": 0, "delta1": 1}, abs=1e-6)


def test_label_maps_keep_their_size_and_predictions_are_resized(tmp_path: Path) -> None:
    for i, size in enumerate([(4, 4), (8, 8)]):
        Image.fromarray(np.full((*size, 3), 255, dtype=np.uint8)).save(tmp_path / f"{i}.jpg")
        labels = np.ones(size, dtype=np.uint8)
        labels[0, 0] = 255
        Image.fromarray(labels).save(tmp_path / f"{i}.png")
    loaded = DensePairs(find_pairs(tmp_path), whole_image((4, 4), (0.0,) * 3, (1.0,) * 3))
    assert [tuple(target.shape) for _, target in loaded] == [(1, 4, 4), (1, 8, 8)]
    head = nn.Conv2d(3, 2, 1)
    head.weight.data.zero_()
    head.bias.data.copy_(torch.tensor([0.0, 1.0]))  # always says class 1
    metric = evaluate_head(Pixels(), head, loaded, Segmentation(2))
    assert metric.result() == {"miou": 1.0}
    assert int(metric.confusion.sum()) == 15 + 63


def test_missing_and_odd_targets_are_errors(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(tmp_path / "x.jpg")
    with pytest.raises(corp.CorpError, match="1 of 1 images have no target"):
        find_pairs(tmp_path)
    Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    with pytest.raises(corp.CorpError, match="one number per pixel"):
        read_target(tmp_path / "x.png")
    (tmp_path / "x.npy").write_text("no array")
    with pytest.raises(corp.CorpError, match="cannot be read as a map"):
        read_target(tmp_path / "x.npy")
    (tmp_path / "x.jpg").write_text("no image")
    np.save(tmp_path / "x.npy", np.ones((4, 4)))
    with pytest.raises(corp.CorpError, match="cannot be decoded"):
        list(DensePairs(find_pairs(tmp_path), whole_image((4, 4), (0.0,) * 3, (1.0,) * 3)))
