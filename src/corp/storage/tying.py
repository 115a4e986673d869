"""Parameters that a model holds under several names (tied embeddings), and loading that keeps them tied."""

from __future__ import annotations

from torch import Tensor, nn


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of parameters that are the same as one named earlier (tied embeddings), and that name."""
    first: dict[int, str] = {}
    names = ((name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: original for name, original in names if name != original}


def saved_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under the names by which they are saved, tied ones once."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def assign(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load by assignment, which keeps the tensors' dtypes but unties shared parameters, and tie those again."""
    tied = tied_names(model)
    whole = {name: tensors[tied.get(name, name)] for name in model.state_dict()}
    model.load_state_dict(whole, assign=True)
    for name, first in tied.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
