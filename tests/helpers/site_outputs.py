"""What one site of a running model computes, read where it computes it: oracles for predicted errors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.calibration.grams import CAUSAL_BLOCKS
from corp.sites import MLPSite, Rows, Sites, ValueSite
from tests.helpers.models import run


@lru_cache(maxsize=2)  # the dense and the pruned model, over all their batches
def sites_of(model: nn.Module) -> Sites:
    return corp.find_sites(model)


def hidden_output(model: nn.Module, site: MLPSite | ValueSite, batch: Any) -> Tensor:
    """What the second linear of an MLP computes, or the output projection of an attention."""
    seen: list[Tensor] = []
    bare = isinstance(site, ValueSite) and site.v.weight != "weight"  # nn.MultiheadAttention calls no out_proj
    module = model.get_submodule(site.attention if bare else site.down)
    handle = module.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if bare else out))
    run(model, batch)
    handle.remove()
    return seen[0]


def logit_errors(dense: nn.Module, pruned: nn.Module, name: str, data: list[Any], centred: bool = False) -> list[float]:
    """Per head, the squared difference of Q K^T over the pairs that count: all, or block-causal ones.

    Of `centred` logits the mean along a row does not count: softmax ignores it.
    """
    causal = bool(sites_of(dense)[name].causal) or ("decoder.layers" in name and name.endswith("self_attn"))
    total: Tensor = torch.zeros((), dtype=torch.float64)
    for batch in data:
        logits = [torch.einsum("bnhd,bmhd->bhnm", *queries_and_keys(m, name, batch)) for m in (dense, pruned)]
        difference = logits[0] - logits[1]  # (B, H, n, m)
        n, ends = difference.shape[-1], [difference.shape[-1]]
        blocks = list(torch.arange(difference.shape[-2]).tensor_split(CAUSAL_BLOCKS if causal else 1))
        ends = [int(block[-1]) + 1 if causal and len(block) else n for block in blocks]
        for block, end in zip(blocks, ends, strict=True):
            seen = difference[..., block, :end]
            total = total + (seen - centred * seen.mean(-1, keepdim=True)).square().sum((0, 2, 3))
    return total.tolist()


def queries_and_keys(model: nn.Module, name: str, batch: Any) -> list[Tensor]:
    """Q and K (B, n, H, d) of one attention, from the inputs of its projections."""
    site, seen = sites_of(model)[name], {}
    module = model.get_submodule(name)
    handles = []
    for rows in (site.q, site.k):
        if rows.weight == "weight":
            linear = model.get_submodule(rows.module)
            handles.append(linear.register_forward_hook(lambda _m, a, _o, key=rows.module: seen.update({key: a[0]})))
    handles.append(module.register_forward_pre_hook(lambda _m, args: seen.update({"": args})))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    run(model, batch)
    torch.backends.mha.set_fastpath_enabled(fast)
    for handle in handles:
        handle.remove()
    found = []
    for rows, position in ((site.q, 0), (site.k, 1)):
        x = seen[rows.module] if rows.weight == "weight" else seen[""][position]
        if rows.weight != "weight" and not module.batch_first:
            x = x.transpose(0, 1)
        weight, bias = parameters_of(model, rows)
        y = x @ weight[rows.start : rows.stop].T
        y = y if bias is None else y + bias[rows.start : rows.stop]
        found.append(y.unflatten(-1, (site.heads, -1)))
    return found


def parameters_of(model: nn.Module, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias of a linear map, as views that can be written to."""
    module = model.get_submodule(rows.module)
    weight = getattr(module, rows.weight).data
    bias = getattr(module, rows.bias)
    return weight.T if type(module).__name__ == "Conv1D" else weight, None if bias is None else bias.data
