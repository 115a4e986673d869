"""Graphs as files: ONNX, run by ONNX Runtime, and PT2, run by torch. Each is read back and compared."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from corp.calibration.batches import evaluating, move
from corp.errors import StorageError
from corp.storage.export.check import apart, named, on_cpu, require_agreement
from corp.storage.export.graphs import (
    INPUT,
    Graph,
    Inputs,
    arguments,
    axis_names,
    first_line,
    inputs_for,
    quiet,
    trace,
    variants,
)
from corp.surgery.attention import true_widths

ONNX, PT2 = "onnx", "pt2"
FILES = {ONNX: "model.onnx", PT2: "model.pt2"}


def write_format(model: nn.Module, folder: Path, target: str, batch: Any) -> float | None:
    """Write `model` into `folder` as FILES[target], read it back, compare: the largest difference.

    `batch` is a small one that the model takes. None comes back where nothing is installed that runs the file.
    """
    if target not in FILES:
        raise StorageError(f"{target!r} is not one of {', '.join(FILES)}")
    # Few ONNX runtimes have kernels for another.
    dtype = torch.float32 if target == ONNX else next(model.parameters()).dtype
    model = on_cpu(model, dtype)
    inputs = move(inputs_for(model, batch), torch.device("cpu"), dtype)
    path = folder / FILES[target]
    if target == PT2:
        program = trace(model, inputs)
        with quiet():
            torch.export.save(program, path)
            reread = torch.export.load(path).module()
        difference = _checked(model, reread, inputs)
    else:
        require_packages("onnx", "onnxscript")
        with true_widths():  # no runtime here has a kernel that would want them padded
            program = trace(model, inputs)
        _write_onnx(program, path, inputs)
        if find_spec("onnxruntime") is None:
            return None
        difference = _checked(model, _Session(path), inputs)
    require_agreement(difference, dtype)
    return difference


def require_packages(*names: str) -> None:
    if missing := [name for name in names if find_spec(name) is None]:
        raise StorageError(f"{' and '.join(missing)} not installed: pip install 'corp-prune[onnx]'")


def load_lines(target: str, path: str, names: list[str]) -> str:
    """How users run the file."""
    file = str(Path(path) / FILES[target])
    if target == PT2:
        given = INPUT if names == [INPUT] else ", ".join(f"{name}={name}" for name in names)
        return f"import torch\n\nmodel = torch.export.load({file!r}).module()\noutputs = model({given})"
    feed = ", ".join(f"{name!r}: {name}" for name in names)
    return (
        f"import onnxruntime\n\nsession = onnxruntime.InferenceSession({file!r})\n"
        f"outputs = session.run(None, {{{feed}}})"
    )


def _checked(model: nn.Module, reread: Any, inputs: Inputs) -> float:
    """The largest difference over batches of several sizes and lengths."""
    plain = Graph(model, list(inputs))
    worst = 0.0
    for batch in variants(inputs):
        args, kwargs = arguments(batch)
        with evaluating(model), torch.no_grad(), quiet():
            expected = named(plain(*args, **kwargs))
            try:
                found = named(reread(*args, **kwargs))
            except Exception as error:  # the runtime's own complaint
                shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
                raise StorageError(f"the exported model does not run for {shapes}: {first_line(error)}") from error
        worst = max(worst, apart(expected, found))
    return worst


def _write_onnx(program: ExportedProgram, path: Path, inputs: Inputs) -> None:
    tree = program.call_spec.out_spec  # in the order of the graph, the keys of the dict that Graph returns
    outputs = list(tree.context) if tree is not None and tree.type is dict else ["output"]
    try:
        with quiet():
            made = torch.onnx.export(
                program, input_names=list(inputs), output_names=outputs, dynamo=True, verbose=False
            )
            assert made is not None
            made.save(path)
        _tidy(path, axis_names(program, inputs))
    except OSError:
        raise
    except Exception as error:  # an operation that has no counterpart there, for one
        raise StorageError(f"torch.onnx cannot write the graph: {first_line(error)}") from error


def _tidy(path: Path, names: dict[str, str]) -> None:
    """torch's symbols (s77) in the shapes of inputs and outputs become batch and sequence; inner shapes go.

    Runtimes infer those themselves, and tools that transpose a weight (ONNX Runtime's quantiser) trip over old ones.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    symbols = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_param = symbols.sub(lambda found: names[found[0]], axis.dim_param)
    del model.graph.value_info[:]
    onnx.save(model, path)


class _Session:
    """A model in ONNX Runtime, called like the module that it was."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors; it warns of initializers that it removed itself
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def __call__(self, *lone: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        inputs = {INPUT: lone[0]} if lone else inputs
        found = self.session.run(self.names, {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in zip(self.names, found, strict=True)}
