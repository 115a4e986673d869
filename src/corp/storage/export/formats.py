"""A model as one traced graph with free batch and sequence axes, in a file: ONNX for ONNX Runtime, or PT2 for torch.

This does not depend on a model library: inputs and outputs are a tensor or named tensors. Each file is read back and
compared.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from corp.calibration.batches import evaluating, inputs_of, move
from corp.errors import StorageError, first_line
from corp.io.files import writing
from corp.storage.export.check import apart, named, on_cpu, require_agreement
from corp.surgery.attention import true_widths

ONNX, PT2 = "onnx", "pt2"
FILES = {ONNX: "model.onnx", PT2: "model.pt2"}
INPUT = "input"  # the input's name if a model takes a single tensor
MASK, IDS, TYPES = "attention_mask", "input_ids", "token_type_ids"
SEQUENCES = (IDS, MASK, TYPES, "decoder_input_ids", "encoder_hidden_states")  # their second axis is the sequence
TRACED = 2  # samples: a size of one would become a constant
BATCH, SEQUENCE = "batch", "sequence"

Inputs = dict[str, Tensor]


def write_format(model: nn.Module, folder: Path, target: str, batch: Any) -> float | None:
    """Write `model` into `folder` as FILES[target], read it back, compare: the largest difference.

    `batch` is a small one that the model accepts. Returns None if nothing is installed that runs the file.
    """
    if target not in FILES:
        raise StorageError(f"{target!r} is not one of {', '.join(FILES)}")
    # Few ONNX runtimes have kernels for other dtypes.
    dtype = torch.float32 if target == ONNX else next(model.parameters()).dtype
    model = on_cpu(model, dtype)
    inputs = move(inputs_for(model, batch), torch.device("cpu"), dtype)
    path = folder / FILES[target]
    if target == PT2:
        program = trace(model, inputs)
        whole = BytesIO()  # a disk that fills up while torch writes to it ends the process
        with quiet():
            torch.export.save(program, whole)
        with writing(path):
            path.write_bytes(whole.getbuffer())
        with quiet():
            reread = torch.export.load(path).module()
        difference = _checked(model, reread, inputs)
    else:
        require_packages("onnx", "onnxscript")
        with true_widths():  # no runtime here has a kernel that needs padding
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
            except Exception as error:  # the runtime's own error
                shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())
                raise StorageError(f"the exported model does not run for {shapes}: {first_line(error)}") from error
        worst = max(worst, apart(expected, found))
    return worst


def _write_onnx(program: ExportedProgram, path: Path, inputs: Inputs) -> None:
    tree = program.call_spec.out_spec  # the keys of the dict that Graph returns, in the order of the graph
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
    except Exception as error:  # for example an operation that has no counterpart there
        raise StorageError(f"torch.onnx cannot write the graph: {first_line(error)}") from error


def _tidy(path: Path, names: dict[str, str]) -> None:
    """Rename torch's symbols (s77) in the shapes of inputs and outputs to batch and sequence; remove inner shapes.

    Runtimes infer inner shapes, and tools that transpose a weight (ONNX Runtime's quantiser) fail on old ones.
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
    """A model in ONNX Runtime, called like the original module."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # only errors; it warns about initializers that it removes itself
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]

    def __call__(self, *lone: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        inputs = {INPUT: lone[0]} if lone else inputs
        found = self.session.run(self.names, {name: value.numpy() for name, value in inputs.items()})
        return {name: torch.from_numpy(value) for name, value in zip(self.names, found, strict=True)}


class Graph(nn.Module):
    """`model` with plain inputs and outputs, so that its exported file needs neither its library nor a cache."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model = model
        lone = names == [INPUT]
        # Keys and values of earlier tokens are state, which a graph does not have.
        fixed = {"use_cache": False} if "use_cache" in _parameters(model) else {}

        def forward(*args: Tensor, **inputs: Tensor) -> Any:
            inputs = {**dict(zip(names, args, strict=False)), **inputs}
            made = model(inputs[INPUT]) if lone else model(**inputs, **fixed)
            return made if isinstance(made, Tensor) else named(made)

        # torch takes the names of the graph's inputs from the signature.
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        self.forward = forward


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


def inputs_for(model: nn.Module, batch: Any) -> Inputs:
    """The inputs by name, including the masks of texts, for as many samples as tracing needs."""
    batch = inputs_of(batch)
    inputs = dict(batch) if isinstance(batch, Mapping) else {INPUT: batch}
    if not inputs or not all(isinstance(value, Tensor) and value.dim() for value in inputs.values()):
        raise StorageError(f"a graph takes a tensor or named tensors, not {type(batch).__name__}")
    takes = _parameters(model)
    if IDS in inputs and MASK in takes:
        inputs.setdefault(MASK, torch.ones_like(inputs[IDS]))
    if IDS in inputs and TYPES in takes and getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1:
        inputs.setdefault(TYPES, torch.zeros_like(inputs[IDS]))
    return {name: _samples(value, TRACED) for name, value in inputs.items()}


def variants(inputs: Inputs) -> list[Inputs]:
    """The inputs that a graph is checked on: other batch sizes and shorter sequences than in tracing, some padded."""
    found = []
    for samples, share in ((1, 1.0), (TRACED, 1.0), (TRACED + 1, 0.6)):
        made = {name: _samples(value, samples) for name, value in inputs.items()}
        for name in made.keys() & set(SEQUENCES):
            made[name] = made[name][:, : max(2, int(share * made[name].shape[1]))].contiguous()
        if MASK in made and samples > 1:
            made[MASK] = made[MASK].clone()
            made[MASK][0, -1] = 0
        found.append(made)
    return found


def arguments(inputs: Inputs) -> tuple[tuple[Tensor, ...], Inputs]:
    """The arguments of a graph: a single tensor by position, others by name."""
    return ((inputs[INPUT],), {}) if list(inputs) == [INPUT] else ((), inputs)


def free_axes(name: str, value: Tensor) -> tuple[int, ...]:
    return (0, 1) if name in SEQUENCES and value.dim() > 1 else (0,)


def trace(model: nn.Module, inputs: Inputs) -> ExportedProgram:
    """The graph of `model` for any batch size and sequence length that it supports."""
    free = {name: dict.fromkeys(free_axes(name, value), Dim.DYNAMIC) for name, value in inputs.items()}
    try:
        with evaluating(model), torch.no_grad(), quiet():
            args, kwargs = arguments(inputs)
            return torch.export.export(Graph(model, list(inputs)), args, kwargs, dynamic_shapes=free)
    except Exception as error:  # of many kinds, and often pages long
        raise StorageError(
            f"torch.export cannot trace {type(model).__name__} with free batch and sequence axes: {first_line(error)}"
        ) from error


def axis_names(program: ExportedProgram, inputs: Inputs) -> dict[str, str]:
    """Symbols of the program's free axes, and their readable names; equal axes have one name."""
    shapes = [
        node.meta["val"].shape for node in program.graph.nodes if node.name in program.graph_signature.user_inputs
    ]
    found: dict[str, str] = {}
    for (name, value), shape in zip(inputs.items(), shapes, strict=True):
        for axis in free_axes(name, value):
            plain = (BATCH, SEQUENCE)[axis]
            own = plain in found.values() and name not in (MASK, TYPES)  # those go with the texts
            found.setdefault(str(shape[axis]), f"{name}_{plain}" if own else plain)
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings about its own future, and its log of errors that it raises as well."""
    log = logging.getLogger("torch")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _samples(value: Tensor, count: int) -> Tensor:
    """`count` samples of a batch, repeated if it has fewer."""
    return value[torch.arange(count, device=value.device) % len(value)]
