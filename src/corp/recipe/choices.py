"""The allowed values of a recipe's fields, the presets, and the targets that widths can be chosen to meet."""

from __future__ import annotations

from typing import Any

RANKINGS = ("exact", "combined", "activation", "magnitude", "active", "wanda", "variance", "fluctuation")
COMPENSATIONS = ("full", "mean", "none")
KINDS = ("mlp", "attn", "vo")  # the kinds of sites; each is a sparsity field of the recipe
TOGETHER = {**{kind: (kind,) for kind in KINDS}, "both": ("mlp", "attn"), "all": KINDS}  # what a sweep prunes together
RIDGE = 1e-3
COORDINATES, SUBSPACE = "coordinates", "subspace"
BASES = (SUBSPACE, COORDINATES)
UNIFORM, GAIN = "uniform", "gain"
ALLOCATIONS = (GAIN, UNIFORM)
FREE, SHARED = "free", "shared"
ROTARY = (FREE, SHARED)
AUTO = "auto"
# Settings of the paper, and of methods for comparison. "best" has the defaults of the fields.
_PAPER: dict[str, Any] = {
    "rank": "combined",
    "attn_basis": COORDINATES,
    "allocate": UNIFORM,
    "sequential": False,
    "round_to": 1,
    "output": 0.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "best": {},
    "paper": _PAPER,
    "magnitude": {**_PAPER, "rank": "magnitude", "compensate": "none"},
    "wanda": {**_PAPER, "rank": "wanda", "compensate": "none"},  # E[x²]^½·‖W‖, structured
    "vbp": {**_PAPER, "rank": "variance", "compensate": "mean"},  # variance ranking, mean shift into the bias
    "flap": {**_PAPER, "rank": "fluctuation", "compensate": "mean"},  # fluctuation score, bias compensation
    "grail": {**_PAPER, "rank": "wanda", "intercept": False},  # uncentred Gram ridge on the second linear
}
TARGETS = {
    "target_macs": "a share of the dense model's",
    "target_params": "a share of the dense model's",
    "target_latency": "a share of the dense model's",
    "min_agreement": "a share of the dense model's answers",
}  # targets that widths can be chosen to meet; at most one
REMOVE, BUDGET, HOW = "What to remove", "Budget and search", "How"  # panels of `corp prune --help`
