"""Train the demo model on the digits training images and write the weights that ship with the package.

Run from a checkout with the demo extra installed: python scripts/train_demo.py
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import corp  # noqa: F401  (first: it makes timm importable where torchvision does not match torch)
from corp.data.digits import WEIGHTS_PATH, Split, build_model, load_split

SEED = 0
BATCH_SIZE = 64
PEAK_LR = 5e-4
WARMUP = 0.1
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.05
INIT_GAIN = 1.7
FC1_INIT_GAIN = 3.5
MAX_SHIFT = 0.6
MAX_DEGREES = 10.0
MAX_ZOOM = 0.1
NOISE_STD = 0.05


def main() -> None:
    """Train, report the accuracy of the weights as stored, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=92)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1, which is reproducible)")
    parser.add_argument("--output", type=Path, default=WEIGHTS_PATH)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    split = load_split()
    started = time.perf_counter()
    model = train(initialise(build_model()), split, args.epochs)
    print(f"trained {args.epochs} epochs in {time.perf_counter() - started:.0f} s")

    weights = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)
    print(f"train accuracy {accuracy(model, split.train_images, split.train_labels):.4f} (float16 weights)")
    print(f"test accuracy {accuracy(model, split.test_images, split.test_labels):.4f} (float16 weights)")
    write_atomically(weights, args.output)
    print(f"wrote {args.output} ({args.output.stat().st_size} bytes)")


def initialise(model: nn.Module) -> nn.Module:
    """Start the blocks from larger random weights than timm's.

    From timm's small start, so easy a task leaves most hidden channels and query/key dimensions barely used, and
    removing half of them goes unnoticed whatever the method. A large start keeps the work spread over all of them.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            nn.init.xavier_uniform_(module.weight, FC1_INIT_GAIN if name.endswith("mlp.fc1") else INIT_GAIN)
    return model


def train(model: nn.Module, split: Split, epochs: int) -> nn.Module:
    """Fit the model to the augmented training images with AdamW, a warm-up and a cosine schedule."""
    images, labels = split.train_images, split.train_labels
    steps = epochs * math.ceil(len(images) / BATCH_SIZE)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=PEAK_LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step / steps))
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(images)).split(BATCH_SIZE):
            logits = model(augment(images[batch]))
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        if (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {total / len(images):.4f}", flush=True)
    return model


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Decay matrices only: pulling biases and norm scales towards zero does not regularise a transformer."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def lr_factor(progress: float) -> float:
    """Scale of the peak learning rate after this fraction of all steps: a linear rise, then half a cosine."""
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP)))


def augment(images: Tensor) -> Tensor:
    """Shift, rotate and zoom each image a little and add noise; 1297 images alone are soon memorised."""
    count, _, height, width = images.shape
    angle = math.radians(MAX_DEGREES) * uniform(count)
    zoom = 1 + MAX_ZOOM * uniform(count)
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    # affine_grid counts an image side as 2 units.
    shift_x, shift_y = MAX_SHIFT * 2 / width * uniform(count), MAX_SHIFT * 2 / height * uniform(count)
    theta = torch.stack([cos, -sin, shift_x, sin, cos, shift_y], dim=1).view(count, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    return moved + NOISE_STD * torch.randn_like(moved)


def uniform(count: int) -> Tensor:
    """Return count samples from [-1, 1)."""
    return 2 * torch.rand(count) - 1


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images classified correctly."""
    model.eval()
    correct: Tensor = model(images).argmax(dim=1) == labels
    return float(correct.float().mean())


def write_atomically(weights: dict[str, Tensor], path: Path) -> None:
    """Write beside the target and rename, so that an interrupted run never leaves a truncated weights file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(weights, temporary)
        temporary.chmod(0o644)  # safetensors lets only the owner read, which an installed package must not
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
