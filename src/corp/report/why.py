"""How widths were chosen, in words: one line per decision that a plan records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corp.planning.widths import NAMES


def _allocation(raw: Mapping[str, Any]) -> str:
    lost = ", ".join(f"{NAMES.get(kind, kind)} {share:.0%}" for kind, share in raw["removed"].items())
    return (
        f"{raw['target']:.3f} of the dense {raw['budget']}, allocation {raw['allocate']}: removed {lost} "
        f"(equal shares of MLPs and Q/K would be {raw['equal_share']:.0%})"
    )


def _latency(raw: Mapping[str, Any]) -> str:
    found = raw["measured"]
    return (
        f"time per sample on {raw['device']}: {found['value']:.3f} of the dense model's ({found['low']:.3f} to "
        f"{found['high']:.3f}), {raw['predicted']:.3f} by the table of measured times"
    )


def _split(raw: Mapping[str, Any]) -> str:
    tried = ", ".join(f"{_tried(one)} {one['divergence']:.4f}" for one in raw["tried"])
    return f"splits tried, and divergence from the dense output on {raw['samples']} held-out samples: {tried}"


def _tried(one: Mapping[str, Any]) -> str:
    return f"Q/K {one['queries']:.0%} at power {one['power']:g}" if "queries" in one else "equal shares"


def _agreement(raw: Mapping[str, Any]) -> str:
    name = next(key for key in raw["steps"][0] if key.startswith("target_"))
    chosen = next(step for step in raw["steps"] if step[name] == raw["chosen"])
    ends = "" if chosen["low"] is None else f" ({chosen['low']:.3f} to {chosen['high']:.3f})"
    return (
        f"agreement {chosen['agreement']:.3f}{ends} at {name}={raw['chosen']:.3f}, {raw['wanted']:g} was wanted: "
        f"{raw['what']}, {raw['samples']} held-out samples, {len(raw['steps'])} models tried"
    )


def _refit(raw: Mapping[str, Any]) -> str:
    left = sorted(one["left"] / one["gap"] for one in raw["layers"].values() if one["gap"] > 0)
    gone = f", closing at most {1 - left[0]:.0%} of the gap to the dense residual stream" if left else ""
    return f"refit on {raw['samples']} samples: {len(left)} layers repair errors of earlier ones{gone}"


def _tokens(raw: Mapping[str, Any]) -> str:
    merged = ", ".join(map(str, raw["schedule"]))
    tried = [one for one in raw.get("tried", ()) if "divergence" in one]
    splits = ", ".join(f"{one['widths']:.2f} {one['divergence']:.4f}" for one in tried)
    why = f"; shares that widths leave, and divergence from the dense output on held-out samples: {splits}"
    return f"tokens merged by block: {merged}; {raw['cost']:.3f} of the dense operations{why if tried else ''}"


_LINES = {
    **{"allocation": _allocation, "latency": _latency, "split": _split, "agreement": _agreement},
    **{"tokens": _tokens, "refit": _refit},
}


def explained(why: Mapping[str, Any]) -> list[str]:
    """One line per recorded decision; empty if the record has another structure."""
    try:
        return [line(why[key]) for key, line in _LINES.items() if key in why]
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
