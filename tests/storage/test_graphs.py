"""ONNX and PT2 files compute what the pruned model does, for batches and lengths that they were not traced with."""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import timm
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import Tensor, nn
from typer.testing import CliRunner

import corp
from corp import CorpError, Recipe
from corp.cli.main import app
from corp.recipe import KINDS
from corp.storage.export import formats
from corp.storage.export.formats import write_format
from tests.helpers import hf_folders, models, rotary_models, small_timm
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
EVERYTHING = Recipe.paper(**dict.fromkeys(KINDS, 0.5))
TARGETS = ("onnx", "pt2")
Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    with small_timm.in_place():
        yield


def pruned(family: str, recipe: Recipe = EVERYTHING, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    """A pruned model, and a batch for it. One block is enough where that is all that repeats: tracing takes long."""
    if family.startswith("rotary-"):
        data = [{"input_ids": batch["input_ids"]} for batch in rotary_models.batches()]
        model = rotary_models.build(family.removeprefix("rotary-"), dtype)
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    else:
        data, model = models.batches(family, dtype=dtype), models.build(family, dtype)
        if family == "vit":
            model.blocks = model.blocks[:1]
    return models.prune(model, data, recipe).model, data[0]


def opened(folder: Path, target: str) -> Run:
    """The file in its runtime alone; a lone output is called output."""
    if target == "pt2":
        model = torch.export.load(folder / "model.pt2").module()

        def run_pt2(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            with torch.no_grad():
                found = model(batch["input"]) if list(batch) == ["input"] else model(**batch)
            return {"output": found} if isinstance(found, Tensor) else found

        return run_pt2
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])

    def run_onnx(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        values = session.run(None, {name: value.numpy() for name, value in batch.items()})
        return {out.name: torch.from_numpy(v) for out, v in zip(session.get_outputs(), values, strict=True)}

    return run_onnx


def run_file(folder: Path, target: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return opened(folder, target)(batch)


def onnx_shapes(folder: Path) -> dict[str, list[Any]]:
    graph = onnx.load(folder / "model.onnx").graph
    return {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


RECIPES = {**{kind: Recipe.paper(**{kind: 0.5}) for kind in KINDS}, "all": EVERYTHING}


@pytest.mark.parametrize("name", by_kind(RECIPES, ["all"]))
def test_images_in_any_number(name: str, tmp_path: Path) -> None:
    model, batch = pruned("vit", RECIPES[name])
    for target in TARGETS:
        assert write_format(model, tmp_path, target, batch) < 1e-5
        graph = opened(tmp_path, target)
        for size in (1, 3, 7):
            found = graph({"input": batch[:size]})["output"]
            torch.testing.assert_close(found, models.run(model, batch[:size]), rtol=0, atol=1e-5)
    assert onnx_shapes(tmp_path) == {"input": ["batch", 3, 16, 16], "output": ["batch", 5]}


def test_the_onnx_graph_has_true_widths(tmp_path: Path) -> None:
    """Padding is for torch's fused kernel; here q k^T is over the four dimensions that were kept of eight."""
    model, batch = pruned("vit", Recipe.paper(mlp=0.5, attn=0.5))
    write_format(model, tmp_path, "onnx", batch)
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "model.onnx")).graph
    assert "Pad" not in {node.op_type for node in graph.node}
    shapes = {value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim] for value in graph.value_info}
    products = [shapes[node.input[0]] for node in graph.node if node.op_type == "MatMul" and node.input[0] in shapes]
    assert sum(shape[-1] == 4 for shape in products if len(shape) == 4) == 1
    weights = {tuple(tensor.dims) for tensor in graph.initializer}
    assert (24, 3 * (4 + 4 + 8)) in weights
    assert (24, 48) in weights


@pytest.mark.slow
def test_the_onnx_file_can_be_quantised(tmp_path: Path) -> None:
    model, batch = pruned("vit")
    write_format(model, tmp_path, "onnx", batch)
    quantize_dynamic(tmp_path / "model.onnx", tmp_path / "small.onnx", per_channel=True, reduce_range=True)
    os.replace(tmp_path / "small.onnx", tmp_path / "model.onnx")
    found, expected = run_file(tmp_path, "onnx", {"input": batch})["output"], models.run(model, batch)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.1


def padded(samples: int, length: int) -> dict[str, Tensor]:
    """Token ids with the mask of texts of unequal length."""
    draw = seeded(samples)
    ids, mask = torch.randint(3, 50, (samples, length), generator=draw), torch.ones(samples, length, dtype=torch.long)
    if samples > 1:
        ids[0, -2:], mask[0, -2:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", by_kind(["hf-bert", "hf-opt", "rotary-llama"], ["rotary-llama"]))
def test_texts_of_any_number_and_length(family: str, tmp_path: Path) -> None:
    model, batch = pruned(family)
    output = "last_hidden_state" if family == "hf-bert" else "logits"
    for target in TARGETS:
        assert write_format(model, tmp_path, target, batch) < 1e-5
        graph = opened(tmp_path, target)
        for size, length in ((1, 2), (3, 17), (5, 9)):
            fed = padded(size, length)
            with torch.no_grad():
                expected: Any = model(**fed)
            if family == "hf-bert":  # two kinds of segments: they are an input, as the tokenizer gives it
                fed["token_type_ids"] = torch.zeros_like(fed["input_ids"])
            found = graph(fed)
            torch.testing.assert_close(found[output], expected[output], rtol=0, atol=1e-5)
            assert set(found) == {key for key, value in expected.items() if isinstance(value, Tensor)}
    shapes = onnx_shapes(tmp_path)
    assert shapes["input_ids"] == shapes["attention_mask"] == ["batch", "sequence"]
    assert shapes[output][:2] == ["batch", "sequence"]


@pytest.mark.slow
def test_towers_take_as_many_texts_as_they_like_for_each_image(tmp_path: Path) -> None:
    model, batch = pruned("hf-clip", Recipe.paper(mlp=0.5, attn=0.5))
    write_format(model, tmp_path, "onnx", batch)
    fed = {**padded(5, 7), "pixel_values": batch["pixel_values"][:2]}
    found = run_file(tmp_path, "onnx", fed)["logits_per_image"]
    torch.testing.assert_close(found, model(**fed)["logits_per_image"].detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_half_precision_stays_in_pt2_and_becomes_single_in_onnx(tmp_path: Path) -> None:
    model, batch = pruned("vit", dtype=torch.bfloat16)
    for target in TARGETS:
        assert write_format(model, tmp_path, target, batch) < 1e-2
    assert next(model.parameters()).dtype == torch.bfloat16
    assert run_file(tmp_path, "pt2", {"input": batch[:3]})["output"].dtype == torch.bfloat16
    found = run_file(tmp_path, "onnx", {"input": batch[:3].float()})["output"]
    torch.testing.assert_close(found, models.run(model.float(), batch[:3].float()), rtol=0, atol=1e-5)


def test_a_model_without_free_axes_is_refused(tmp_path: Path) -> None:
    class TwoByTwo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if float(x.sum()) > 0 else x

    with pytest.raises(CorpError, match=r"cannot trace TwoByTwo with free batch and sequence axes: \S"):
        write_format(TwoByTwo(), tmp_path, "onnx", torch.ones(2, 4))
    with pytest.raises(CorpError, match="'tflite' is not one of onnx, pt2"):
        write_format(TwoByTwo(), tmp_path, "tflite", torch.ones(2, 4))
    with pytest.raises(CorpError, match=r"takes a tensor or named tensors, not dict"):
        write_format(TwoByTwo(), tmp_path, "pt2", {"x": 3})


def run(*args: object) -> Any:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def said(result: Any) -> str:
    return " ".join(result.output.split())


def images() -> list[Tensor]:
    draw = seeded(4)
    return [torch.randn(8, 3, 32, 32, generator=draw) for _ in range(10)]


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit") / "pruned"
    corp.save(corp.prune(timm.create_model(small_timm.NAME, img_size=32).eval(), images(), EVERYTHING), folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bert")
    hf_folders.bert(root / "dense", layers=1)
    (root / "texts.txt").write_text("\n".join(hf_folders.sentences(60, 10)))
    made = run("prune", root / "dense", "--calib", root / "texts.txt", "--sparsity", 0.5, "-o", root / "pruned")
    assert made.exit_code == 0, made.output
    return root / "pruned"


@pytest.mark.parametrize("target", by_kind(TARGETS, ["onnx"]))
def test_export_of_images_on_the_command_line(vit: Path, target: str, tmp_path: Path) -> None:
    made = run("export", vit, "--to", target, "-o", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert str(tmp_path / "out" / f"model.{target}") in said(made)
    record = json.loads((tmp_path / "out" / "corp-export.json").read_text())
    assert (record["target"], record["profile"]) == (target, None)
    assert 0 <= record["difference"] < 1e-5
    assert len(record["base"]["identity"]["preprocessing"]["mean"]) == 3
    x = images()[0][:5]
    found = run_file(tmp_path / "out", target, {"input": x})["output"]
    torch.testing.assert_close(found, models.run(corp.load(vit), x), rtol=0, atol=1e-5)
    assert f"out/model.{target}" in (tmp_path / "out" / "README.md").read_text()


def test_export_of_texts_on_the_command_line(bert: Path, tmp_path: Path) -> None:
    made = run("export", bert, "--to", "onnx", "-o", tmp_path / "out", "--json")
    assert made.exit_code == 0, made.output
    content = json.loads(made.stdout)
    assert content["params"]["pruned"] == content["params"]["written"]
    assert "tokenizer.json" in content["companions"]
    assert "'input_ids': input_ids, 'attention_mask': attention_mask" in content["load"]


def test_what_cannot_be_exported_is_refused_before_the_work(
    vit: Path, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("-o", tmp_path / "new")
    for arguments, message in (
        ((vit, "--to", "hf"), "this is a model of timm, which hf cannot load; use --to timm"),
        ((bert, "--to", "timm"), "this is a model of transformers, which timm cannot load; use --to hf"),
        ((vit, "--to", "onnx", "--profile", "compat"), "--profile compat goes with --to timm or hf"),
        ((tmp_path, "--to", "onnx"), "corp.json"),
    ):
        failed = run("export", *arguments, *out)
        assert failed.exit_code == 1, failed.output
        assert message in said(failed)
    real = importlib.util.find_spec
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxscript" else real(name))
    failed = run("export", vit, "--to", "onnx", *out)
    assert failed.exit_code == 1
    assert "onnxscript not installed: pip install 'corp-prune[onnx]'" in said(failed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_a_runtime_the_file_is_written_and_said_to_be_unchecked(
    vit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    made = run("export", vit, "--to", "onnx", "-o", tmp_path / "out")
    assert made.exit_code == 0, made.output
    assert "not compared with the pruned model: onnxruntime is not installed" in said(made)
    assert json.loads((tmp_path / "out" / "corp-export.json").read_text())["difference"] is None
    assert "were not compared" in (tmp_path / "out" / "README.md").read_text()
    monkeypatch.undo()
    x = images()[0][:3]
    found = run_file(tmp_path / "out", "onnx", {"input": x})["output"]
    torch.testing.assert_close(found, models.run(corp.load(vit), x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("target", by_kind(TARGETS, ["onnx"]))
def test_a_graph_that_disagrees_is_not_written(
    vit: Path, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = formats.trace

    def wrong(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.bias[0] += 1
        return real(other, inputs)

    monkeypatch.setattr(formats, "trace", wrong)
    failed = run("export", vit, "--to", target, "-o", tmp_path / "out")
    assert failed.exit_code == 1
    assert "disagrees with the pruned one" in said(failed)
    assert list(tmp_path.iterdir()) == []


def test_torch_logs_nothing_while_it_traces() -> None:
    """Ctrl-C in a trace is logged by torch as an error of its own, with a traceback."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    assert log.isEnabledFor(logging.ERROR)
    with formats.quiet():
        assert not log.isEnabledFor(logging.ERROR)
    assert log.isEnabledFor(logging.ERROR)
