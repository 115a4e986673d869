"""How widths were chosen, in words: the record that a plan carries, one line per decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"mlp": "MLPs", "attn": "queries and keys", "vo": "values"}


def explained(why: Mapping[str, Any]) -> list[str]:
    """Lines for people; a record that came from elsewhere and says something else is left out."""
    lines = []
    try:
        if "allocation" in why:
            lines.append(_allocation(why["allocation"]))
        if "latency" in why:
            lines.append(_latency(why["latency"]))
        if "split" in why:
            lines.append(_split(why["split"]))
        if "agreement" in why:
            lines.append(_agreement(why["agreement"]))
        if "refit" in why:
            lines.append(_refit(why["refit"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return []
    return lines


def _allocation(raw: Mapping[str, Any]) -> str:
    lost = ", ".join(f"{NAMES.get(kind, kind)} {share:.0%}" for kind, share in raw["removed"].items())
    return (
        f"{raw['target']:.3f} of the dense {raw['budget']}, allocated by {raw['allocate']}: removed are {lost} "
        f"(equal shares of MLPs and Q/K would be {raw['equal_share']:.0%})"
    )


def _latency(raw: Mapping[str, Any]) -> str:
    found = raw["measured"]
    return (
        f"time per sample on {raw['device']}: {found['value']:.3f} of the dense model's ({found['low']:.3f} to "
        f"{found['high']:.3f}), {raw['predicted']:.3f} by the table of times"
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
        f"agreement {chosen['agreement']:.3f}{ends} at {name}={raw['chosen']:.3f}, {raw['wanted']:g} was asked for: "
        f"{raw['what']}, {raw['samples']} held-out samples, {len(raw['steps'])} models tried"
    )


def _refit(raw: Mapping[str, Any]) -> str:
    left = sorted(one["left"] / one["gap"] for one in raw["layers"].values() if one["gap"] > 0)
    gone = f", {1 - left[0]:.0%} of the gap to the dense model's stream at most" if left else ""
    return f"refit on {raw['samples']} samples: {len(left)} layers repair errors of earlier ones{gone}"
