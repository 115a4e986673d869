"""corp eval: labels of every kind, several models in one pass, and one message for what cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from typer.testing import Result

import corp
from corp.adapters import timm_models
from corp.data.images import ImageBatches, list_images
from corp.data.labels import LabelledBatches, find_labels, read_labels
from tests.helpers import command, small_timm
from tests.helpers.seeds import seed, seed_all

MODEL = small_timm.NAME


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


def run(*args: object) -> Result:
    return command.run("eval", *args)


def content(*args: object) -> dict[str, Any]:
    return command.content("eval", *args, "--device", "cpu")


def photo(path: Path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed(number)).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((80, 80)).save(path)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed_all(0)
    model = timm.create_model(MODEL)
    nn.init.normal_(model.head.weight, std=0.5)  # classes that differ from image to image
    path = tmp_path_factory.mktemp("weights") / "deit.safetensors"
    save_file(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(6):
        photo(folder / f"{i}.png", i)
    return folder


@pytest.fixture(scope="module")
def logits(weights: Path, photos: Path) -> torch.Tensor:
    model = timm_models.create(MODEL, weights)
    with torch.no_grad():
        return torch.cat([model(x) for x in ImageBatches(list_images([photos]), timm_models.preprocessing(model))])


@pytest.fixture(scope="module")
def pruned(weights: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = timm_models.create(MODEL, weights)
    batches = ImageBatches(list_images([photos]), timm_models.preprocessing(model))
    result = corp.prune(model, batches, corp.Recipe.paper(mlp=0.5, compensate="none"))
    folder = tmp_path_factory.mktemp("pruned") / "deit-50"
    corp.save(result, folder)
    return folder


def test_several_models_in_one_pass(
    weights: Path, photos: Path, pruned: Path, logits: torch.Tensor, tmp_path: Path
) -> None:
    # The dense model is right on images 0 to 3, has 4 among its five best, and is all wrong on 5.
    order = logits.argsort(1, descending=True)
    labels = [*order[:4, 0].tolist(), int(order[4, 3]), int(order[5, 500])]
    (tmp_path / "labels.csv").write_text("file,label\n" + "".join(f"{i}.png,{c}\n" for i, c in enumerate(labels)))
    given = (MODEL, pruned, "--weights", weights, "--data", photos, "--labels", tmp_path / "labels.csv")
    shown = content(*given, "--batch-size", 4)
    dense, smaller = shown["models"]
    assert (shown["dense"], shown["data"]["images"], shown["labelled"]) == (MODEL, 6, True)
    assert (dense["top1"]["value"], dense["top5"]["value"]) == pytest.approx((4 / 6, 5 / 6))
    assert dense["agreement"] is dense["kl"] is dense["top1_difference"] is dense["features"] is None

    model = corp.load(pruned)
    with torch.no_grad():
        batches = ImageBatches(list_images([photos]), timm_models.preprocessing(model))
        other = torch.cat([model(x) for x in batches])
    right = float((other.argmax(1) == torch.tensor(labels)).float().mean())
    assert smaller["top1"]["value"] == pytest.approx(right)
    assert smaller["top1_difference"]["value"] == pytest.approx(right - 4 / 6, abs=1e-6)
    assert smaller["agreement"]["value"] == pytest.approx(float((other.argmax(1) == order[:, 0]).float().mean()))
    kl = nn.functional.kl_div(other.log_softmax(1), logits.log_softmax(1), log_target=True, reduction="batchmean")
    assert smaller["kl"]["value"] == pytest.approx(float(kl), rel=1e-3)
    assert list(smaller["features"]["blocks"]) == [f"blocks.{i}" for i in range(small_timm.BLOCKS)]
    assert smaller["features"]["final"]["relative_error"] > 0
    assert smaller["features"]["final"]["cosine"] < 1
    assert smaller["agreement"]["value"] < 1  # else the numbers above would be too easy
    assert smaller["params"] < dense["params"]

    text = run(*given, "--device", "cpu")
    assert text.exit_code == 0, text.output
    assert "66.7 [" in text.output
    assert f"blocks.{small_timm.BLOCKS - 1}" in text.output


def test_without_labels_only_closeness_and_alone_only_accuracy(weights: Path, photos: Path, pruned: Path) -> None:
    shown = content(pruned, "--dense", MODEL, "--weights", weights, "--data", photos, "--samples", 2)
    assert [row["model"] for row in shown["models"]] == [MODEL, str(pruned)]
    assert shown["models"][1]["top1"] is None
    assert shown["models"][1]["agreement"] is not None
    assert shown["data"]["images"] == 2


def test_a_folder_alone_is_judged_by_labels(pruned: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("".join(f"{i}.png,7\n" for i in range(6)))
    (row,) = content(pruned, "--data", photos, "--labels", tmp_path / "labels.csv", "--samples", 1)["models"]
    assert row["top1"]["value"] in (0, 1)
    assert row["kl"] is row["features"] is None


def test_unreadable_images_take_their_labels_with_them(tmp_path: Path) -> None:
    for i in range(5):
        photo(tmp_path / f"c{i}" / "x.png", i)
    (tmp_path / "c2" / "x.png").write_text("no image")
    labels = find_labels([tmp_path], 5)
    assert labels is not None
    batches = ImageBatches(list_images([tmp_path]), lambda image: torch.zeros(1), batch_size=2, max_bad=0.5)
    assert [y.tolist() for _, y in LabelledBatches(batches, labels)] == [[0, 1], [3], [4]]


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_sub_folders_and_synset_ids_are_classes_in_sorted_order(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "dog" / "1.jpg", tmp_path / "a" / "cat" / "deep" / "2.jpg")
    found = find_labels([tmp_path / "a"], 2)
    assert found is not None
    assert {path.name: label for path, label in found.items()} == {"1.jpg": 1, "2.jpg": 0}
    touch(*(tmp_path / "b" / f"n0{1000 + i}000_x.JPEG" for i in reversed(range(3))))
    found = find_labels([tmp_path / "b"], 3)
    assert found is not None
    assert sorted(found.values()) == [0, 1, 2]
    assert found[tmp_path / "b" / "n01002000_x.JPEG"] == 2


def test_names_that_are_not_all_the_classes_are_no_labels(tmp_path: Path) -> None:
    touch(tmp_path / "a" / "holiday" / "1.jpg", tmp_path / "b" / "1.jpg", tmp_path / "c" / "n01440764_1.jpg")
    assert find_labels([tmp_path / "a"], 1000) is None
    assert find_labels([tmp_path / "b"], 1) is None
    with pytest.raises(corp.CorpError, match=r"1 synset ids.* 1000 classes.*does not give the classes"):
        find_labels([tmp_path / "c"], 1000)


def test_csv_of_labels(tmp_path: Path) -> None:
    root, file = tmp_path / "data", tmp_path / "labels.csv"
    touch(root / "a" / "1.jpg", root / "b" / "1.jpg", root / "b" / "2.jpg")
    file.write_text("label,file,why\n3,a/1.jpg,x\n4,b/1.jpg,y\n5,2.jpg,z\n9,unused.jpg,\n")
    assert list(read_labels(file, [root]).values()) == [3, 4, 5]
    file.write_text("1.jpg,3\n2.jpg,5\n")  # two files are called 1.jpg
    with pytest.raises(corp.CorpError, match="no label for 2 of 3 images"):
        read_labels(file, [root])
    for text, message in (("", "holds no labels"), ("a.jpg,tench\n", "line 1: 'a.jpg,tench' is not file,label")):
        file.write_text(text)
        with pytest.raises(corp.CorpError, match=message):
            read_labels(file, [root])
    file.write_text("a/1.jpg,1\nb/1.jpg,2\nb/2.jpg,5\n")
    with pytest.raises(corp.CorpError, match=r"labels.csv: 2.jpg has the label 5, .* 0 to 4; .* from 1 \(1 of 3"):
        read_labels(file, [root], 5)
    file.write_text("a/1.jpg,0\nb/1.jpg,-1\nb/2.jpg,9\n")
    with pytest.raises(corp.CorpError, match=r"labels.csv: 1.jpg has the label -1, but labels count from 0 \(1 of 3"):
        read_labels(file, [root])


BAD = {
    "no such folder": (["--data", "nowhere"], "does not exist"),
    "no such model": (["deit_tny_patch16_224"], "did you mean deit_tiny_patch16_224"),
    "no such labels": (["--labels", "nothing.csv"], "there is no file nothing.csv"),
    "damaged": (["--data", "DAMAGED", "--labels", "ONE"], "cannot be decoded"),
    "nothing to measure": (["--labels", "none"], "nothing to measure"),
    "label beyond the classes": (["--labels", "BEYOND"], "has the label 1000, but the model has classes 0 to 999"),
    "fewer synsets": (["--data", "SYNSETS"], "does not give the classes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_message(case: str, weights: Path, photos: Path, tmp_path: Path) -> None:
    args, message = BAD[case]
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "x.jpg").write_text("no image")
    touch(tmp_path / "synsets" / "n01440764_x.jpg")
    (tmp_path / "beyond.csv").write_text("".join(f"{i}.png,1000\n" for i in range(6)))
    (tmp_path / "one.csv").write_text("x.jpg,0\n")
    places = {"DAMAGED": tmp_path / "damaged", "SYNSETS": tmp_path / "synsets", "BEYOND": tmp_path / "beyond.csv"}
    places["ONE"] = tmp_path / "one.csv"
    given = [str(places.get(arg, arg)) for arg in args]
    given += [] if "--data" in given else ["--data", str(photos)]
    model = [] if given[0].startswith("deit") else [MODEL, "--weights", str(weights)]
    result = run(*model, *given, "--device", "cpu")
    assert result.exit_code == 1, result.output
    assert message in " ".join(result.output.split())
    assert result.output.count("error:") == 1
    assert "Traceback" not in result.output


def test_models_that_cannot_share_a_pass_are_refused(
    weights: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = timm_models.create
    monkeypatch.setattr(timm_models, "create", lambda name, weights, **_: create(name, weights))
    common = (MODEL, "--weights", weights, "--data", photos, "--device", "cpu")
    other = run(*common, "vit_tiny_patch16_224")
    assert other.exit_code == 1
    assert "preprocesses images differently" in other.output
    headless = run(*common, "vit_small_patch14_dinov2")
    assert headless.exit_code == 1
    assert f"{MODEL} 1000, vit_small_patch14_dinov2 0" in headless.output
