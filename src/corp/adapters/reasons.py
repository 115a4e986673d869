"""How a trial that failed is told: what was done to the site, and how much changed."""

from __future__ import annotations

import math

from torch import nn

from corp.adapters.structure import normalises
from corp.sites import AttentionSite, MLPSite, Site

WHAT = {
    "mlp": "permuting its channels and changing half of them changes the others",
    "vo": "mapping its values and undoing that before the output projection changes what that takes",
    "attn": "mapping queries and keys by inverse transposes changes the attention",
}
ESCAPED = "tried out on the model, its output changes: something besides its own layer uses what it makes"
NO_KERNEL = (
    "its queries and keys are rotated, and the rotated ones reach no attention kernel, where they are read; use "
    'attn_implementation="sdpa" if the model has it'
)


def why_failed(model: nn.Module, site: Site, change: float) -> str:
    """Why a site is refused whose best alternative changed what it must not by this share of its size."""
    if isinstance(site, MLPSite) and math.isinf(change):
        makers = " and ".join(dict.fromkeys(rows.module.rpartition(".")[2] for rows in site.up))
        return f"tried out on the model, what {makers} makes does not arrive at {site.down.rpartition('.')[2]}"
    amount = f" (by {change:.2g} of its size)" if math.isfinite(change) else ""
    more = normalises(model.get_submodule(site.attention)) if isinstance(site, AttentionSite) else ""
    return f"tried out on the model, {WHAT[site.kind]}{amount}{more}"
