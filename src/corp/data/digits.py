"""A small ViT trained on scikit-learn's handwritten digits, and the images to prune and evaluate it with.

Both the weights and the data come with installed packages, so the demo needs no network. timm and scikit-learn are
optional dependencies and are imported only when a function here is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from corp.errors import CorpError

WEIGHTS_PATH = Path(__file__).with_name("digits_vit.safetensors")

MODEL_ARGS: dict[str, Any] = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
MODEL_ARGS |= {"embed_dim": 80, "depth": 6, "num_heads": 4, "mlp_ratio": 4.0, "qkv_bias": True}
"""Keyword arguments of timm's VisionTransformer: 16 patches and a class token, heads of 20 dimensions."""

_TEST_IMAGES = 500
_SPLIT_SEED = 0
# Mean and standard deviation of the pixels (0 to 16) over the data set. They are constants rather than computed, so
# that the shipped weights always see the scale they were trained on.
_PIXEL_MEAN = 4.88
_PIXEL_STD = 6.02


class Split(NamedTuple):
    """Images for training and calibration, and held-out ones for evaluation; only training uses `train_labels`."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def calibration_images(self) -> Tensor:
        return self.train_images


def build_model() -> nn.Module:
    """Return the demo architecture with fresh random weights, in training mode."""
    try:
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise _missing("timm") from error
    model: nn.Module = VisionTransformer(**MODEL_ARGS)
    return model


def load_model() -> nn.Module:
    """Return the trained demo model in float32 and evaluation mode.

    The file holds float16 to stay small in the wheel; copying into the float32 parameters widens the values.
    """
    model = build_model()
    try:
        weights = load_file(WEIGHTS_PATH)
    except FileNotFoundError as error:
        raise CorpError(f"the demo weights {WEIGHTS_PATH.name} are missing from this installation") from error
    model.load_state_dict(weights)
    return model.eval()


def load_split() -> Split:
    """Divide the 1797 digits into 1297 for training and 500 for testing, as the shipped weights were trained.

    Images are float32 of shape (N, 1, 8, 8), normalised; labels are int64. The split is stratified by digit.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise _missing("scikit-learn") from error
    digits = load_digits()
    train_x, test_x, train_y, test_y = train_test_split(
        digits.images, digits.target, test_size=_TEST_IMAGES, random_state=_SPLIT_SEED, stratify=digits.target
    )
    return Split(_as_images(train_x), torch.as_tensor(train_y), _as_images(test_x), torch.as_tensor(test_y))


def _as_images(pixels: Any) -> Tensor:
    return (torch.as_tensor(pixels, dtype=torch.float32).unsqueeze(1) - _PIXEL_MEAN) / _PIXEL_STD


def _missing(package: str) -> CorpError:
    return CorpError(f"the demo needs {package}; install it with: pip install 'corp-prune[demo]'")
