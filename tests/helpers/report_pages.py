"""Runs and sweeps to make report pages of, harmless and hostile, and a parser of the pages."""

from __future__ import annotations

from html.parser import HTMLParser

from corp.planning.plan import Plan
from corp.planning.report import Report
from corp.planning.site_plan import GroupCost, SitePlan
from corp.recipe import Recipe
from corp.report.html import Run

EVIL = "<script>alert(1)</script>"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """What a page holds; refuses tags that do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.text[self.open[-1]][-1] += data

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        found = [attrs for name, attrs in self.tags if name == tag]
        return [attrs for attrs in found if wanted.items() <= attrs.items()]


def site(name: str, kind: str, costs: list[tuple[float, float, float]]) -> SitePlan:
    """Costs are (J, J_uncomp, rho²) of an output with energy 10."""
    groups = tuple(GroupCost(J, J / 2, lost, rho2, 10.0) for J, lost, rho2 in costs)
    return SitePlan(name, kind, 8, 0.5, ((0, 1, 2, 3),) * len(groups), True, groups)


def plan(tail: str = "", recipe: Recipe | None = None) -> Plan:
    sites = (
        site(f"blocks.0.attn{tail}", "attn", [(1.0, 2.0, 0.75), (0.5, 1.0, 0.5)]),
        site(f"blocks.0.mlp{tail}", "mlp", [(0.1, 3.0, 0.9)]),
        site(f"blocks.1.attn{tail}", "attn", [(0.2, 2.0, 0.25), (0.3, 1.0, 0.125)]),
        site(f"blocks.1.mlp{tail}", "mlp", [(0.3, 5.0, 0.8)]),
    )
    return Plan(recipe or Recipe.paper(mlp=0.5, attn=0.5), sites, "abc123", 64)


def run(name: str = "my-run", planned: Plan | None = None, **manifest: object) -> Run:
    base = {"adapter": "timm", "identity": {"architecture": "vit_x", "tag": "in1k", "preprocessing": {"mean": [0.5]}}}
    content = {"format": "corp-model", "corp": "9.8.7", "torch": "1.2.3", "base": base, **manifest}
    return Run(name, content, Report(planned or plan(), (4_000_000, 1_000_000), (2_000_000_000, 500_000_000)))


def evil_run() -> Run:
    recipe = Recipe.paper(mlp=0.5, skip=(EVIL,), overrides={EVIL: {"mlp": 0.1}})
    identity = {"architecture": EVIL, "tag": EVIL, "args": {EVIL: EVIL}, "preprocessing": {EVIL: [EVIL]}}
    return run(f"{EVIL}\"'&", plan(EVIL, recipe), base={"identity": identity}, extra=EVIL, corp=EVIL)


SWEEP = [
    {"mlp": s, "attn": s, "rank": "combined", "compensate": c, "params": 10, "macs": None, "agreement": 1 - s, "kl": s}
    for c in ("full", "none")
    for s in (0.3, 0.1, 0.2)
]
DEMO = {"model": "m", "images": 5, "dense": 0.98, "rows": [{"sparsity": 0.5, "corp": 0.9, "paper": 0.5, "none": 0.4}]}
