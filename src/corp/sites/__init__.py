"""Where prunable things are in a model: names of modules come in; plain data and the weights it points at go out.

It imports errors and io only; every package after it may import it, by the names listed here.
"""

from corp.sites.found import Finding, Layer, Refusal, Sites
from corp.sites.kinds import (
    AttentionSite,
    LinearSite,
    Mask,
    MLPSite,
    OutputHead,
    QKNorm,
    Rotary,
    Rows,
    Site,
    ValueSite,
    at_site,
    heads_of,
    layers_of,
    module_of,
)
from corp.sites.weights import (
    Projection,
    fingerprint,
    fingerprint_of,
    gains_of,
    is_transposed,
    projection_at,
    projection_of,
    rows_of,
    site_devices,
)

__all__ = [
    "AttentionSite",
    "Finding",
    "Layer",
    "LinearSite",
    "MLPSite",
    "Mask",
    "OutputHead",
    "Projection",
    "QKNorm",
    "Refusal",
    "Rotary",
    "Rows",
    "Site",
    "Sites",
    "ValueSite",
    "at_site",
    "fingerprint",
    "fingerprint_of",
    "gains_of",
    "heads_of",
    "is_transposed",
    "layers_of",
    "module_of",
    "projection_at",
    "projection_of",
    "rows_of",
    "site_devices",
]
