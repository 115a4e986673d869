"""The per-site table of a plan, and the before/after report of a pruned model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from corp.plan import Plan, SitePlan

COLUMNS = ("site", "kind", "width", "kept", "asked", "removed", "rho²", "error", "error without compensation")


def site_row(site: SitePlan) -> tuple[str, ...]:
    heads = f"{len(site.kept)} x " if site.kind == "attn" else ""
    return (
        site.name,
        site.kind,
        f"{heads}{site.width}",
        f"{heads}{site.keep}",
        f"{site.requested:.1%}",
        f"{site.achieved:.1%}",
        f"{site.rho2:.3f}",
        f"{site.relative_error:.2%}",
        f"{site.relative_uncompensated:.2%}",
    )


def site_dict(site: SitePlan) -> dict[str, Any]:
    return {
        "name": site.name,
        "kind": site.kind,
        "heads": len(site.kept) if site.kind == "attn" else None,
        "width": site.width,
        "kept": site.keep,
        "requested": site.requested,
        "achieved": site.achieved,
        "rho2": site.rho2,
        "relative_error": site.relative_error,
        "relative_uncompensated": site.relative_uncompensated,
        "groups": [vars(cost) for cost in site.costs],
    }


def plan_text(plan: Plan) -> str:
    if not plan.sites:
        return "nothing to prune: every site keeps its width"
    return text_table(COLUMNS, [site_row(site) for site in plan.sites])


def text_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Plain text, columns aligned; the command line has a richer one."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (columns, *rows)]
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Report:
    """What pruning did: print it, or take `to_dict()`. `macs` is None where the input's shape is unknown."""

    plan: Plan
    params: tuple[int, int]
    macs: tuple[int, int] | None = None

    def totals(self) -> list[tuple[str, str, str, str]]:
        """(what, before, after, after / before) for parameters and, if known, operations per sample."""
        rows = [_total("parameters", self.params, 1e6, "M")]
        if self.macs is not None:
            rows.append(_total("MACs per sample", self.macs, 1e9, "G"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        return {
            "params": {"before": self.params[0], "after": self.params[1]},
            "macs": None if self.macs is None else {"before": self.macs[0], "after": self.macs[1]},
            "samples": self.plan.samples,
            "recipe": self.plan.recipe.to_dict(),
            "sites": [site_dict(site) for site in self.plan.sites],
        }

    def __str__(self) -> str:
        totals = text_table(("", "before", "after", "ratio"), self.totals())  # type: ignore[arg-type]
        return f"{plan_text(self.plan)}\n\n{totals}"


def _total(what: str, pair: tuple[int, int], unit: float, letter: str) -> tuple[str, str, str, str]:
    before, after = pair
    return what, f"{before / unit:.3f} {letter}", f"{after / unit:.3f} {letter}", f"{after / max(1, before):.3f}"
