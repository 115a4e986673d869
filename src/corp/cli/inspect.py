"""corp inspect: the sites, widths and parameters of a model or of a saved folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corp.adapters.registry import find_sites
from corp.api import history
from corp.cli import options as o
from corp.cli.console import command, note, show_json, show_table
from corp.measure.cost import count_params
from corp.sites import Site, heads_of


@command
def inspect(model: o.ModelArg, weights: o.Weights = None, json: o.Json = False) -> None:
    """Show what can be pruned in MODEL, what cannot and why, or what was done to a saved folder."""
    loaded = o.load_model(model, weights, pretrained=False)
    sites = find_sites(loaded)
    before = {site.name: site.width for plan in reversed(history(loaded)) for site in plan.sites}
    if json:
        content: dict[str, Any] = {"model": model, "params": count_params(loaded), **sites.to_dict()}
        for entry in content["sites"]:
            entry["dense_width"] = before.get(entry["name"], entry["width"])
        show_json(content)
        return
    show_table(str(Path(model)), ("site", "kind", "width", "dense"), [_row(site, before) for site in sites])
    if sites.refused:
        rows = [(refusal.name, refusal.kind, refusal.reason) for refusal in sites.refused]
        show_table("cannot be pruned", ("site", "kind", "reason"), rows)
    shares = ", ".join(f"{share:.1%} {state}" for state, share in sites.coverage().items())
    note(f"of the parameters {shares}; {len(sites.proven)} of {len(sites)} sites were tried out on the model")
    rest = {layer.reason: layer.name for layer in sites.layers if layer.state == "refused"}
    known = {refusal.reason for refusal in sites.refused}
    if others := [(name, reason) for reason, name in rest.items() if reason not in known]:
        show_table("not recognised", ("such as", "reason"), others)
    note(f"{count_params(loaded) / 1e6:.3f} M parameters, {len(sites)} sites ({sites.adapter})")


def _row(site: Site, before: dict[str, int]) -> tuple[str, str, str, str]:
    heads = f"{count} x " if (count := heads_of(site)) else ""
    return site.name, site.kind, f"{heads}{site.width}", f"{heads}{before.get(site.name, site.width)}"
