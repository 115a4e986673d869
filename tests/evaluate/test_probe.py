"""Heads in closed form: against stacked least squares, exact answers, and data that cannot be fitted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import corp
from corp.calibration.holdout import HoldOut
from corp.errors import CorpWarning
from corp.evaluate.heads import HeadInfo, WithHead
from corp.evaluate.probe import WeightedSums, fit_head, patch_targets
from tests.helpers.maps import scored
from tests.helpers.seeds import seed_all


class Pixels(nn.Module):
    """A backbone whose features are the channels of 2 x 2 patches."""

    def forward_features(self, x: Tensor) -> Tensor:
        return nn.functional.pixel_unshuffle(x, 2).flatten(2).mT

    num_prefix_tokens = 0


def test_the_fit_equals_brute_force_weighted_ridge() -> None:
    seed_all(0)
    x, y, w = torch.randn(40, 5).double() + 3, torch.randn(40, 2).double(), torch.rand(40).double()
    sums = WeightedSums()
    sums.update(x[:25], y[:25], w[:25])
    rest = WeightedSums()
    rest.update(x[25:], y[25:], w[25:])
    moments = (sums + rest).moments()
    mean = (w[:, None] * x).sum(0) / w.sum()
    centred, root = x - mean, w.sqrt()[:, None]
    target = y - (w[:, None] * y).sum(0) / w.sum()
    torch.testing.assert_close(moments.cov, (root * centred).mT @ (root * centred) / w.sum())
    torch.testing.assert_close(moments.cross, (root * target).mT @ (root * centred) / w.sum())
    assert moments.energy == pytest.approx(float((w[:, None] * target.square()).sum() / w.sum()))


def pairs(targets: Tensor, images: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(images.split(7), targets.split(7), strict=True))


def test_a_linear_depth_is_found_exactly_also_with_holes() -> None:
    images = torch.rand(30, 3, 4, 6)
    patches = nn.functional.pixel_unshuffle(images, 2)  # (30, 12, 2, 3)
    depth = 2 + (patches * torch.linspace(-0.3, 0.5, 12)[:, None, None]).sum(1)
    full = depth.repeat_interleave(2, 1).repeat_interleave(2, 2).double()
    full[:, 0, 0] = 0.0  # no depth there
    full[3, 2:] = float("nan")
    probe = fit_head(Pixels().eval(), pairs(full, images), HeadInfo("depth"))
    assert probe.explained > 0.999
    assert probe.ridge == 1e-5
    with torch.no_grad():
        torch.testing.assert_close(probe.head(patches)[:, 0], depth, rtol=1e-3, atol=1e-3)
    found = scored(WithHead(Pixels(), probe.head), [(images, depth)], "depth").estimates()
    assert found["delta1"].value == 1.0


def test_rare_classes_are_predicted_and_unlabelled_pixels_are_not_data() -> None:
    seed_all(0)
    labels = (torch.rand(60, 2, 3) < 0.04).long()  # 4 % are class 1
    images = 0.6 * torch.randn(60, 3, 4, 6)
    images[:, 0] += labels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    maps = labels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    maps[::2, :2, :2] = 9
    probe = fit_head(Pixels().eval(), pairs(maps, images), HeadInfo(ignore=9))
    assert probe.head.weight.shape == (2, 12)
    with torch.no_grad():
        predicted = probe.head(nn.functional.pixel_unshuffle(images, 2)).argmax(1)
    assert float((predicted[labels == 1] == 1).double().mean()) > 0.3
    scores = scored(WithHead(Pixels(), probe.head), pairs(maps, images), "segmentation", 9).estimates()
    assert scores["pixel_accuracy"].value > 0.9


def test_patch_targets_equal_a_loop_over_patches() -> None:
    maps = torch.randint(0, 4, (2, 6, 9))
    maps[maps == 3] = 255
    pixels = torch.tensor([10, 20, 70])
    share, weight = patch_targets(maps, (2, 3), HeadInfo(), pixels)
    factor = (pixels / 100.0) ** -0.5
    for b, i, j in [(0, 0, 0), (1, 1, 2), (0, 1, 1)]:
        patch = maps[b, 3 * i : 3 * i + 3, 3 * j : 3 * j + 3]
        counts = torch.stack([factor[k] * (patch == k).sum() / 9 for k in range(3)])
        assert float(weight[b, i, j]) == pytest.approx(float(counts.sum()), rel=1e-5)
        torch.testing.assert_close(share[b, :, i, j], counts / counts.sum())


def test_the_images_that_choose_the_ridge_are_those_of_the_one_hold_out_rule() -> None:
    """Labels of these images alone are of no use for a fit, and those of the others alone cannot choose its ridge."""
    images, rule = torch.rand(24, 3, 4, 6), HoldOut(24)
    held = torch.tensor([rule.holds(i) for i in range(24)])
    for unlabelled in (held, ~held):
        maps = torch.randint(0, 2, (24, 4, 6))
        maps[unlabelled] = 255
        with pytest.raises(corp.CorpError, match="no labelled pixel in the images"):
            fit_head(Pixels().eval(), pairs(maps, images), HeadInfo())


def test_memory_does_not_grow_with_the_images() -> None:
    sums = WeightedSums()
    for _ in range(3):
        sums.update(torch.randn(50, 4), torch.randn(50, 2), torch.ones(50))
    assert sum(tensor.numel() for tensor in vars(sums).values()) == 4 + 4 * 4 + 2 + 2 * 4 + 2


def test_what_cannot_be_fitted_is_said() -> None:
    images, info = torch.rand(20, 3, 4, 6), HeadInfo()
    with pytest.raises(corp.CorpError, match="no images to fit"):
        fit_head(Pixels(), [], info)
    with pytest.raises(corp.CorpError, match="too few"):
        fit_head(Pixels(), pairs(torch.zeros(2, 4, 6), images[:2]), info)
    with pytest.raises(corp.CorpError, match="all are 255"):
        fit_head(Pixels(), pairs(torch.full((20, 4, 6), 255), images), info)
    with pytest.raises(corp.CorpError, match="label 4 is neither one of the 3 classes"):
        fit_head(Pixels(), pairs(torch.full((20, 4, 6), 4), images), info, classes=3)
    with pytest.raises(corp.CorpError, match="no pixel has a depth"):
        fit_head(Pixels(), pairs(torch.zeros(20, 4, 6), images), HeadInfo("depth"))
    only = torch.full((20, 4, 6), 255)
    only[0] = 1
    with pytest.raises(corp.CorpError, match="no labelled pixel in the images"):
        fit_head(Pixels(), pairs(only, images), info)
    labels = torch.arange(20 * 24.0).view(20, 4, 6) % 5 + 1
    with pytest.warns(CorpWarning, match="maps of classes are for the task 'segmentation'"), torch.no_grad():
        fit_head(Pixels().eval(), pairs(labels, images), HeadInfo("depth"))
    with pytest.warns(CorpWarning, match="median depth is 2500"), torch.no_grad():
        fit_head(
            Pixels().eval(), pairs(torch.full((20, 4, 6), 2500.0) + torch.rand(20, 4, 6), images), HeadInfo("depth")
        )
