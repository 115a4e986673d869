"""corp inspect: the sites, widths and parameters of a model or of a saved folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from corp.cli import arguments as a
from corp.cli import early
from corp.cli.console import command, note, progress, show_json, show_table

if TYPE_CHECKING:
    from corp.sites import Site


@command
def inspect(model: a.Model, weights: a.Weights = None, json: a.Json = False) -> None:
    """Show what can be pruned in MODEL, what cannot and why, or what was done to a saved folder."""
    early.require_model(model, weights, pretrained=False)
    from corp.adapters.registry import find_sites
    from corp.cli.models import load_model
    from corp.measure.cost import count_params
    from corp.surgery.apply import history

    with progress(f"loading {model}", None, "", quiet=json):
        loaded = load_model(model, weights, pretrained=False)
    sites = find_sites(loaded)
    before = {site.name: site.width for plan in reversed(history(loaded)) for site in plan.sites}
    if json:
        content: dict[str, Any] = {"model": model, "params": count_params(loaded), **sites.to_dict()}
        for entry in content["sites"]:
            entry["dense_width"] = before.get(entry["name"], entry["width"])
        show_json(content)
        return
    columns = ("site", "kind", "width", "dense") if before else ("site", "kind", "width")
    show_table(str(Path(model)), columns, [_row(site, before)[: len(columns)] for site in sites])
    if sites.refused:
        rows = [(refusal.name, refusal.kind, refusal.reason) for refusal in sites.refused]
        show_table("cannot be pruned", ("site", "kind", "reason"), rows)
    rest = {layer.reason: layer.name for layer in sites.layers if layer.state == "refused"}
    known = {refusal.reason for refusal in sites.refused}
    if others := [(name, reason) for reason, name in rest.items() if reason not in known]:
        show_table("not recognised", ("such as", "reason"), others)
    shares = sites.coverage()
    note(
        f"{count_params(loaded) / 1e6:.3f} M parameters: {shares['pruned']:.1%} in {len(sites)} sites that can be "
        f"pruned ({len(sites.proven)} of them verified by a trial), {shares['refused']:.1%} in layers that cannot be "
        f"pruned, {shares['outside']:.1%} elsewhere"
    )


def _row(site: Site, before: dict[str, int]) -> tuple[str, str, str, str]:
    from corp.sites import heads_of

    heads = f"{count} x " if (count := heads_of(site)) else ""
    return site.name, site.kind, f"{heads}{site.width}", f"{heads}{before.get(site.name, site.width)}"
