"""corp probe and corp eval on maps: heads fitted and judged from the command line, and one message for bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import timm
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import corp
from corp.adapters import timm_models
from corp.data.dense import DensePairs, WholeImage, find_pairs
from corp.evaluate.heads import HeadInfo, LinearHead, WithHead, load_head, save_head
from tests.helpers import command, small_timm
from tests.helpers.command import failure, run
from tests.helpers.maps import scored
from tests.helpers.seeds import seed, seed_all

MODEL, SIZE = small_timm.NAME, "32x48"


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed_all(0)
    path = tmp_path_factory.mktemp("weights") / "vit.safetensors"
    state = timm.create_model(MODEL).state_dict()  # with MLPs large enough to matter
    save_file({name: 5 * value if ".mlp.fc" in name else value for name, value in state.items()}, path)
    return path


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty images in images/ whose left part is red and right part blue, with labels/ that say so and depths/."""
    root, rng = tmp_path_factory.mktemp("data") / "scenes", np.random.default_rng(seed())
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    (root.parent / "rooms").mkdir()
    (root.parent / "roomsannot").mkdir()
    for i in range(20):
        labels = np.zeros((32, 48), dtype=np.uint8)
        labels[:, 16 * rng.integers(1, 3) :] = 1
        pixels = rng.integers(0, 60, (32, 48, 3)) + np.array([[180, 20, 20], [20, 20, 180]])[labels]
        for folder in (root / "images", root.parent / "rooms"):
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02}.png")
        labels[:4] = 9
        Image.fromarray(labels).save(root / "labels" / f"{i:02}.png")
        depth = (1000 + 1500 * (labels == 1)).astype(np.uint16)
        Image.fromarray(depth).save(root.parent / "roomsannot" / f"{i:02}.png")
    return root


@pytest.fixture(scope="module")
def head(weights: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "head.safetensors"
    args = ("probe", MODEL, "--weights", weights, "--data", scenes, "--out", path, "--blocks", 2)
    found = command.content(*args, "--ignore", 9, "--image-size", SIZE, "--device", "cpu")
    assert (found["images"], found["outputs"], found["width"]) == (20, 2, 128)
    assert found["explained"] > 0.8
    return path


@pytest.fixture(scope="module")
def pruned(weights: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = timm_models.create(MODEL, weights)
    model.set_input_size(img_size=(32, 48))
    batches = [x for x, _ in DensePairs(find_pairs(scenes), WholeImage((32, 48), (0.5,) * 3, (0.5,) * 3))]
    folder = tmp_path_factory.mktemp("pruned") / "vit-90"
    corp.save(corp.prune(model, batches, corp.Recipe(mlp=0.9, compensate="none")), folder)
    return folder


def test_a_fitted_head_is_judged_as_from_python(weights: Path, scenes: Path, head: Path) -> None:
    args = ("eval", MODEL, "--weights", weights, "--data", scenes, "--head", head, "--device", "cpu")
    content = command.content(*args)
    assert (content["task"], content["labelled"], content["image_size"]) == ("segmentation", True, [32, 48])
    loaded, info = load_head(head)
    assert info == HeadInfo("segmentation", 2, 9, (32, 48))
    backbone = timm_models.create(MODEL, weights)
    backbone.set_input_size(img_size=(32, 48))
    pairs = DensePairs(find_pairs(scenes), WholeImage((32, 48), (0.5,) * 3, (0.5,) * 3))
    expected = scored(WithHead(backbone, loaded, 2), pairs, "segmentation", 9).estimates()
    row = content["models"][0]
    assert row["miou"]["value"] == pytest.approx(expected["miou"].value)
    assert row["pixel_accuracy"]["value"] > 0.9
    assert row["miou"]["low"] <= row["miou"]["value"] <= row["miou"]["high"]
    assert command.run(*args).exit_code == 0


def test_a_pruned_backbone_beside_the_dense_one(weights: Path, scenes: Path, pruned: Path, tmp_path: Path) -> None:
    head, random = tmp_path / "random.safetensors", LinearHead(64, 5)
    nn.init.normal_(random.weight)
    save_head(random, HeadInfo(ignore=9, image_size=(32, 48)), head)
    args = ("eval", MODEL, pruned, "--weights", weights, "--head", head, "--device", "cpu", "--samples", 10)
    dense, other = command.content(*args, "--data", scenes)["models"]
    assert other["params"] < dense["params"]
    assert other["miou_difference"]["value"] == pytest.approx(other["miou"]["value"] - dense["miou"]["value"])
    assert 0 < other["pixel_accuracy_to_dense"]["value"] < 1
    assert "miou_difference" not in dense
    table = command.run(*args, "--data", scenes)
    assert table.exit_code == 0, table.output
    assert "mIoU % − dense" in table.output
    alone = command.content(*args, "--data", scenes / "images")  # without maps only agreement is left
    assert not alone["labelled"]
    assert set(alone["models"][1]) == {"model", "params", "miou_to_dense", "pixel_accuracy_to_dense"}


def test_depth_in_millimetres(weights: Path, scenes: Path, tmp_path: Path) -> None:
    rooms, out = scenes.parent / "rooms", tmp_path / "depth.safetensors"
    shared = ("--weights", weights, "--data", rooms, "--image-size", SIZE, "--device", "cpu", "--depth-scale", 1000)
    command.content("probe", MODEL, *shared, "--task", "depth", "--out", out)
    row = command.content("eval", MODEL, *shared, "--task", "depth", "--head", out)["models"][0]
    assert row["rmse"]["value"] < 0.5
    assert row["delta1"]["value"] > 0.7
    wrong = command.run("eval", MODEL, *shared[:-2], "--head", out)
    assert "are both in metres?" in " ".join(wrong.output.split())


def test_one_message_for_bad_input(weights: Path, scenes: Path, head: Path, tmp_path: Path) -> None:
    dense = ("eval", MODEL, "--weights", weights, "--device", "cpu")
    assert "nothing to measure" in failure(*dense, "--data", scenes / "images", "--head", head)
    assert "fit a head with corp probe" in failure(*dense, "--data", scenes, "--task", "depth")
    assert "which predict segmentation" in failure(*dense, "--data", scenes, "--task", "depth", "--head", head)
    assert "is not HEIGHTxWIDTH" in failure(*dense, "--data", scenes, "--head", head, "--image-size", "big")
    assert "not a multiple of the patch size 16" in failure(
        *dense, "--data", scenes, "--head", head, "--image-size", 40
    )
    assert "label 9 is neither one of the 2 classes" in failure(
        *dense, "--data", scenes, "--head", head, "--ignore", 255
    )
    save_head(LinearHead(100, 2), HeadInfo(), tmp_path / "odd.safetensors")
    assert "reads 100 channels" in failure(*dense, "--data", scenes, "--head", tmp_path / "odd.safetensors")
    probe = ("probe", MODEL, "--weights", weights, "--data", scenes, "--device", "cpu", "--image-size", SIZE)
    assert "exists" in failure(*probe, "--out", head)
    assert "label 9 is neither one of the 2 classes" in failure(*probe, "--out", tmp_path / "new", "--classes", 2)
    usage = run(*probe, "--out", tmp_path / "new", "--task", "pose")
    assert usage.exit_code == 2
    assert "'segmentation', 'depth'" in usage.output
    assert not (tmp_path / "new").exists()


def test_a_whole_model_of_transformers_gives_its_own_maps(scenes: Path, tmp_path: Path) -> None:
    seed_all(0)
    sizes = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 28, "patch_size": 7}
    stages = {"out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False}
    config = transformers.DepthAnythingConfig(
        backbone_config=transformers.Dinov2Config(**sizes, **stages, mlp_ratio=2), reassemble_hidden_size=24,
        patch_size=7, neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, head_hidden_size=4,
    )  # fmt: skip
    model = transformers.DepthAnythingForDepthEstimation(config)
    nn.init.constant_(model.head.conv3.bias, 1.0)
    model.save_pretrained(tmp_path / "depth")
    transformers.ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(tmp_path / "depth")
    shared = ("eval", f"hf:{tmp_path / 'depth'}", "--data", scenes.parent / "rooms", "--device", "cpu")
    content = command.content(*shared, "--image-size", "28x42", "--depth-scale", 1000)
    assert (content["task"], content["head"], content["image_size"]) == ("depth", None, [28, 42])
    assert content["models"][0]["rmse"]["value"] > 0


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_a_backbone_is_pruned_at_the_size_and_under_the_head_that_it_is_used_with(
    weights: Path, scenes: Path, head: Path, tmp_path: Path
) -> None:
    common = ("prune", MODEL, "--weights", weights, "--calib", scenes / "images", "--batch-size", 5, "--device", "cpu")
    out = tmp_path / "small"
    asked = ("--preset", "paper", "--target-macs", 0.8, "--tokens", "1,0")
    found = command.content(*common, "--head", head, "-o", out, *asked, "--eval-data", scenes)
    assert found["macs"]["after"] <= 0.8 * found["macs"]["before"]
    tokens = 1 + 2 * 3  # at 32 x 48 pixels
    assert found["macs"]["before"] < 2 * tokens * sum(p.numel() for p in timm.create_model(MODEL).parameters())
    small, dense = (one["miou"]["value"] for one in found["evaluation"]["models"][::-1])
    assert abs(small - dense) < 0.5
    merging = corp.load(out).blocks
    assert merging.unmerge
    assert "12 x 50 is not a multiple of the patch size 16" in failure(
        *common, "-o", out, *asked, "--image-size", "12x50", "--overwrite"
    )
    assert "cannot be combined with --stats" in failure(
        "prune", MODEL, "--weights", weights, "--stats", tmp_path, "-o", tmp_path / "x", "--head", head, "--mlp", 0.5
    )
