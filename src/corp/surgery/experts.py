"""Experts packed in three-dimensional parameters, split into separate linear layers and packed again.

Calibration, planning and surgery work on linear layers, so they use a copy of the model in which packed experts are
split. The layers are views of the packed parameters and need no memory. A narrowed model is packed again, so that the
library's own grouped kernels run it. transformers' interface for experts (`use_experts_implementation`) tells how they
are packed, and every module that is split must compute the same as before.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from corp.sites import MLPSite, Rows

CONTRACT = ("num_experts", "has_gate", "has_bias", "is_transposed", "is_concatenated", "down_proj")
WIDTHS = ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size")  # its name, by class
TOKENS = 5  # random ones, on which both forms must agree


class Expert(nn.Module):
    """One expert: `up` makes its channels (and the gate's, if there is one), `down` consumes them."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down


class Experts(nn.Module):
    """The experts of a packed module, by number, called like the packed one; `packed` is the rest of that module."""

    def __init__(self, dense: Any) -> None:
        super().__init__()
        self.packed = _shell(dense)
        self.training = dense.training
        for number in range(dense.num_experts):
            self.add_module(str(number), Expert(*(_linear(dense, side, number) for side in (_up(dense), "down_proj"))))

    def __iter__(self) -> Any:
        return (getattr(self, str(number)) for number in range(self.packed.num_experts))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)  # (N, D)
        for number, expert in enumerate(self):
            token, place = torch.where(top_k_index == number)
            if not len(token):
                continue
            hidden = expert.up(hidden_states[token])
            y = expert.down(self.packed._apply_gate(hidden) if self.packed.has_gate else self.packed.act_fn(hidden))
            if getattr(self.packed, "has_post_expert_norm", False):
                y = self.packed.post_expert_norm(y)
            out.index_add_(0, token, (y * top_k_weights[token, place, None]).to(out.dtype))
        return out


def expert_sites(name: str, module: Experts) -> list[MLPSite]:
    """Every expert of the module called `name` as an MLP."""
    return [_site(name, number, module, expert) for number, expert in enumerate(module)]


def _site(name: str, number: int, module: Experts, expert: Expert) -> MLPSite:
    here, width = f"{name}.{number}", expert.down.in_features
    if not module.packed.has_gate:
        up: tuple[Rows, ...] = (Rows(f"{here}.up", 0, width),)
    elif module.packed.is_concatenated:
        up = (Rows(f"{here}.up", 0, width), Rows(f"{here}.up", width, 2 * width))
    else:  # gate and up of one channel are neighbours
        up = tuple(Rows(f"{here}.up", side, side + 1, runs=width, period=2) for side in (0, 1))
    return MLPSite(here, up, f"{here}.down", experts=name)


def why_packed(module: nn.Module) -> str | None:
    """Why the experts of a module cannot be split; None if it has none, or they can be."""
    matrices = [p for p in module.parameters(recurse=False) if p.dim() == 3 and min(p.shape) > 1]
    if type(module).__module__.startswith("torch.nn."):
        return None  # not experts: some of torch's norms and convolutions have three-dimensional parameters
    if len(matrices) < 2 and not (matrices and "expert" in type(module).__name__.lower()):
        return None
    kind = f"{type(module).__name__} keeps its experts packed in one parameter"
    if not all(hasattr(module, name) for name in (*CONTRACT, _up(module))) or not hasattr(module, "_apply_gate"):
        return f"{kind} in a way of its own (not by transformers' experts interface)"
    known = any(p.is_meta for p in matrices) or _agrees(module)
    return None if known else f"{kind}, and computes something else than an MLP for each"


@torch.no_grad()
def _agrees(dense: Any) -> bool:
    """Whether the split experts compute the same as the packed module, on random tokens and routes."""
    apart, like = Experts(dense), dense.down_proj
    draw = torch.Generator().manual_seed(0)
    D = next(iter(apart)).down.out_features
    x = torch.randn(TOKENS, D, generator=draw).to(like)
    route = torch.stack([torch.randperm(dense.num_experts, generator=draw)[:2] for _ in range(TOKENS)]).to(like.device)
    share = torch.rand(route.shape, generator=draw).to(like)
    try:
        a, b = dense(x, route, share), apart(x, route, share)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # it is called in another way
        return False
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(a.abs().max()))


def unpack(model: nn.Module) -> None:
    """Split packed experts, in place."""
    for name, module in list(model.named_modules()):
        if opens(module):
            model.set_submodule(name, Experts(module))


def opens(module: nn.Module) -> bool:
    """Whether a module holds packed experts that can be split."""
    return all(hasattr(module, name) for name in CONTRACT) and hasattr(module, _up(module)) and not why_packed(module)


def pack(model: nn.Module) -> list[str]:
    """Pack experts again, in place; returns the modules that cannot be, because of different widths or new biases."""
    left = []
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            if (whole := _packed(module)) is None:
                left.append(name)
            else:
                model.set_submodule(name, whole)
    return left


def _packed(module: Experts) -> nn.Module | None:
    experts, old = list(module), module.packed
    shapes = {(e.up.weight.shape, e.down.weight.shape) for e in experts}
    if len(shapes) > 1 or any((layer.bias is not None) != old.has_bias for e in experts for layer in (e.up, e.down)):
        return None
    made: Any = _shell(old)
    for name, layers in ((_up(old), [e.up for e in experts]), ("down_proj", [e.down for e in experts])):
        weights = [layer.weight.detach() for layer in layers]
        stacked = torch.stack([w.mT if old.is_transposed else w for w in weights])
        setattr(made, name, nn.Parameter(stacked, requires_grad=layers[0].weight.requires_grad))
        if old.has_bias:
            biases = torch.stack([layer.bias.detach() for layer in layers])
            setattr(made, f"{name}_bias", nn.Parameter(biases, requires_grad=layers[0].weight.requires_grad))
    for name in set(WIDTHS) & set(vars(made)):
        setattr(made, name, experts[0].down.in_features)
    return made.train(module.training)  # type: ignore[no-any-return]


def _up(dense: Any) -> str:
    return "gate_up_proj" if getattr(dense, "has_gate", True) else "up_proj"


def _shell(dense: Any) -> Any:
    """The module without its packed parameters: its gate, its flags, what it applies afterwards."""
    shell = copy.copy(dense)
    packed = {f"{side}{part}" for side in (_up(dense), "down_proj") for part in ("", "_bias")}
    for own in ("_parameters", "_buffers", "_modules"):
        setattr(shell, own, {name: value for name, value in getattr(dense, own).items() if name not in packed})
    return shell


def _linear(dense: Any, name: str, number: int) -> nn.Linear:
    """One expert's layer, a view of the packed parameter."""
    packed = getattr(dense, name)
    weight = packed.detach()[number].mT if dense.is_transposed else packed.detach()[number]
    bias = getattr(dense, f"{name}_bias").detach()[number] if dense.has_bias else None
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=packed.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=packed.requires_grad)
    return made.train(dense.training)
