"""What users really get wrong: one message each, in the spelling of the command line, with what to type instead."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import timm
import torch
import typer
from PIL import Image
from safetensors.torch import save_file

from corp.adapters import hf_models, hub, timm_models
from corp.cli.console import command, in_flags, told
from corp.cli.early import require_output
from corp.cli.inputs import refuse_labels, warn_of_odd_images
from corp.data.documents import in_order, open_documents
from corp.errors import CorpWarning, DataError, ModelError
from corp.recipe import Recipe
from tests.helpers.command import failure
from tests.helpers.seeds import seeded

SPELLED = {
    "sequential=True needs the data: use corp.prune": "--sequential needs the data: use corp prune",
    "it cannot go with sequential=False": "it cannot go with --no-sequential",
    "target_macs=0.1 is out of reach": "--target-macs 0.1 is out of reach",
    "give target_params instead": "give --target-params instead",
    "leave it alone with skip=['blocks.0.attn']": "leave it alone with --skip blocks.0.attn",
    "Leave them alone with skip=[...] over their names": "Leave them alone with --skip ... over their names",
    "rank='best' is not one of 'exact'": "--rank best is not one of 'exact'",
    "prune it again with intercept=False, or": "prune it again with --intercept no, or",
    "choose another output, or pass overwrite=True": "choose another output, or pass --overwrite",
    "give it memory=1.5GB or less": "give it --memory 1.5GB or less",
    "a target chooses the widths: use overrides": "a target chooses the widths: use --override",
    "corp.load('out', base=model)": "corp.load('out', base=model)",
    "--override 'mlp=0.2' should look like 'blocks.0.*:mlp=0.2,attn=0'": (
        "--override 'mlp=0.2' should look like 'blocks.0.*:mlp=0.2,attn=0'"
    ),
}


@pytest.mark.parametrize("text", SPELLED)
def test_python_arguments_are_told_as_options(text: str) -> None:
    assert in_flags(text) == SPELLED[text]


def test_no_error_of_a_recipe_names_a_python_argument_on_the_command_line(tmp_path: Path) -> None:
    common = ("prune", "deit_tiny_patch16_224", "-o", tmp_path / "out")
    assert failure(*common, "--target-macs", 2).startswith("error: --target-macs 2.0 must be a share")
    assert "--min-agreement" in failure(*common, "--target-macs", 0.5, "--min-agreement", 0.9)
    assert "--sequential-samples is used" in failure(
        *common, "--mlp", 0.5, "--sequential-samples", 8, "--no-sequential"
    )


def test_a_run_says_what_it_will_do() -> None:
    assert Recipe(mlp=0.5, attn=0.25).goal() == "by 50% of its MLP channels and 25% of its query and key dimensions"
    assert Recipe(target_macs=0.6).goal() == "to at most 60% of its MACs"
    assert Recipe(min_agreement=0.95).goal() == "as far as 95.0% agreement with the dense model allows"


def test_a_folder_that_is_missing_is_told_with_one_that_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "smollm2-135m").mkdir(parents=True)
    said = failure("prune", "hf:m/smolm2", "--calib", tmp_path, "--mlp", 0.5, "-o", tmp_path / "out")
    assert "the hub cannot be reached; did you mean hf:m/smollm2-135m?" in said
    assert "did you mean hf:m/smollm2-135m" in failure("inspect", "hf:./m/smollm2")


def test_a_missing_path_is_told_with_one_that_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "small", "unlike"):
        (tmp_path / name).mkdir()
    (tmp_path / "deit.safetensors").write_bytes(b"")
    model = ("prune", "deit_tiny_patch16_224", "--mlp", 0.5, "-o", "out", "--weights")
    assert failure(*model, "deit.safetensors", "--calib", "photo").endswith("not exist; did you mean photos?")
    assert failure(*model, "diet.safetensors", "--calib", "photos").endswith("did you mean deit.safetensors?")
    assert failure("bench", "smal").endswith("no folder of that name; did you mean small?")


def test_a_file_in_place_of_a_folder_and_the_reverse_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "deit.safetensors").write_bytes(b"")
    weights = failure(
        "prune", "deit_tiny_patch16_224", "--weights", "photos", "--calib", "photos", "--mlp", 0.5, "-o", "o"
    )
    assert weights == "error: photos is a folder, but --weights FILE takes a file (.safetensors or .pth)"
    assert failure("inspect", "deit.safetensors").endswith("and the file as --weights deit.safetensors")


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_a_binary_file_is_not_taken_for_text(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a{suffix}"
    save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(DataError, match=rf"a{suffix} is not text in UTF-8: it has zero bytes"):
        list(in_order(open_documents([file], field="text", lines=False, piece=100)))


def test_a_table_of_many_columns_is_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(",".join(f"c{i}" for i in range(500)) + "\n")
    with pytest.raises(DataError, match=r"it has 'c0', .*'c7' and 492 more; give the field of the text as field=NAME"):
        open_documents([file], field="text", lines=False, piece=100)


def test_the_hub_is_asked_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert hub.reachable(address)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert not hub.reachable(address)
        monkeypatch.delenv("HF_HUB_OFFLINE")
    assert not hub.reachable(address)  # nobody listens any more


def test_weights_that_nobody_can_fetch_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"are not on this machine, and .* cannot be reached; .*weights=FILE"):
        timm_models.create("deit_tiny_patch16_224", pretrained=True)


def test_a_tokenizer_that_nobody_can_fetch_is_told_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"no downloaded hub model .* cannot be reached; .*tokenizer=FOLDER"):
        hf_models.tokenizer("someone/nothing")


def test_weights_of_another_model_are_told_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file(timm.create_model("deit_tiny_distilled_patch16_224").state_dict(), file)
    said = "does not fit deit_tiny_patch16_224; its tensors fit deit_tiny_distilled_patch16_224: give that name"
    with pytest.raises(ModelError, match=said):
        timm_models.create("deit_tiny_patch16_224", file)
    save_file({"weight": torch.zeros(2)}, file)
    with pytest.raises(ModelError, match="give the model that it was saved from"):
        timm_models.create("deit_tiny_patch16_224", file)


def _image(path: Path, values: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    grey = torch.randint(values, (48, 48), dtype=torch.uint8, generator=seeded(0))
    Image.fromarray(grey.numpy()).save(path)
    return path


def test_a_folder_of_labels_is_refused_with_the_folder_of_images(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    for i in range(3):
        (labels / f"{i}.txt").write_text("0 0.5 0.5 1 1")
    with pytest.raises(DataError, match=r"labels holds labels \(3 .txt files\) and no images; try --calib with"):
        refuse_labels([labels])
    _image(tmp_path / "images" / "0.png", 255)
    with pytest.raises(DataError, match=re.escape(f"try --calib {tmp_path / 'images'}")):
        refuse_labels([labels])
    refuse_labels([tmp_path / "images"])


def test_few_images_and_label_maps_are_told(tmp_path: Path) -> None:
    photograph, labels = _image(tmp_path / "p.png", 255), _image(tmp_path / "m.png", 5)
    with pytest.warns(CorpWarning, match="8 images are too few .* at least 64 with --calib"):
        warn_of_odd_images([photograph] * 8)
    with pytest.warns(CorpWarning, match="as label maps do; --calib takes the photographs"):
        warn_of_odd_images([labels] * 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_odd_images([photograph] * 100)


def test_a_field_without_text_and_a_missing_tokenizer_say_what_to_type(tmp_path: Path) -> None:
    from corp.adapters import hf_models

    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"body": "words"}) + "\n")
    with pytest.raises(DataError) as caught:
        list(in_order(open_documents([file], field="text", lines=False, piece=100)))
    assert "it has 'body'; give the field of the text as --text-field NAME" in in_flags(str(caught.value))
    with pytest.raises(DataError) as caught:
        hf_models.tokenizer(str(tmp_path))
    assert "give its folder as --tokenizer FOLDER" in in_flags(str(caught.value))


def test_a_full_disk_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(typer.Exit), told(), full.open("w") as file:
        file.write("x" * 100_000)
    assert "the disk is full" in (said := capsys.readouterr().err)
    assert "-o" in said


@pytest.mark.parametrize(
    ("name", "way"), [("calibrate", "start the same command again to continue"), ("prune", "--stats STATS")]
)
def test_an_interrupted_command_says_what_is_kept(name: str, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    interrupted.__name__ = name
    with pytest.raises(typer.Exit) as ended:
        command(interrupted)()
    assert ended.value.exit_code == 130
    assert way in " ".join(capsys.readouterr().err.split())


def test_warnings_are_told_in_the_spelling_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def warned() -> None:
        warnings.warn("target_latency=0.5 was missed", CorpWarning, stacklevel=1)

    with warnings.catch_warnings():
        warned()
    assert "--target-latency 0.5 was missed" in capsys.readouterr().err


def test_a_mistyped_timm_name_is_told_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys\nfrom functools import partial\nfrom corp.cli import early\n"
        "require_model = partial(early.require_model, pretrained=False)\n"
        "require_model('deit_tiny_patch16_224.fb_in1k')\nrequire_model('vit_base_patch16_224_in21k')  # an old name\n"
        "try:\n    require_model('deit_tinny')\nexcept Exception as error:\n    print(error)\n"
        "print([name for name in ('torch', 'timm', 'numpy') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "did you mean deit_tiny_patch16_224" in told
    assert told.endswith("[]\n")


def test_an_output_below_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file, not a folder"):
        require_output(tmp_path / "file" / "out", overwrite=False)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_place_that_takes_no_files_is_not_called_a_full_disk() -> None:
    with pytest.raises(DataError, match=r"/proc/out cannot be written: .* name another place with -o"):
        require_output(Path("/proc/out"), overwrite=False)


def test_a_value_after_an_option_keeps_its_own_spelling() -> None:
    assert in_flags("prune with --round-to mlp=64") == "prune with --round-to mlp=64"
    assert in_flags("prune with mlp=0.5 (target_macs=0.6)") == "prune with --mlp 0.5 (--target-macs 0.6)"


def test_missing_inputs_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom corp.cli.main import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 1\n"
        "assert 'torch' not in sys.modules"
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "weights.safetensors").write_bytes(b"")
    model = ["prune", "deit_tiny_patch16_224", "--target-macs", "0.6"]
    weights = ["--weights", str(tmp_path / "weights.safetensors")]
    for message, args in {
        "no calibration data": weights,
        "--calib missing does not exist": [*weights, "--calib", "missing"],
        "there is no weights file": ["--weights", "missing", "--calib", str(tmp_path)],
        "out exists; choose another": [*weights, "--calib", str(tmp_path), "-o", str(tmp_path / "out")],
        "are not on this machine": ["--calib", str(tmp_path)],
    }.items():
        hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, *model, *args], capture_output=True, text=True, check=False,
            env={**os.environ, **hub},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert message in done.stderr
