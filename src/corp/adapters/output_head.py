"""The output head of a language model: the linear layer that maps hidden states to one logit per token."""

from __future__ import annotations

from typing import Any

from torch import nn

from corp.sites import MLPSite, OutputHead, Site
from corp.surgery.linear import why_not_linear

WIDER = 4  # a head with fewer outputs per input is not over a vocabulary, and too cheap to factor


def find_output(model: nn.Module, sites: list[Site]) -> OutputHead | None:
    """The head that transformers' models name by get_output_embeddings, if it is a plain, wide linear layer."""
    get: Any = getattr(model, "get_output_embeddings", None)
    head: Any = get() if callable(get) else None
    if why_not_linear(head) or head.out_features < WIDER * head.in_features:
        return None
    name = next((name for name, module in model.named_modules() if module is head), None)
    if name is None:
        return None
    tied = sum(parameter is head.weight for _, parameter in model.named_parameters(remove_duplicate=False)) > 1
    mask = next((site.mask for site in sites if isinstance(site, MLPSite)), None)
    return OutputHead(name, head.in_features, head.out_features, tied, mask)
