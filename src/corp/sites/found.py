"""What was found in a model: its sites, what was refused and why, and the state of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from corp.errors import ModelError
from corp.io.tables import Tabular
from corp.sites.kinds import AttentionSite, MLPSite, OutputHead, Site, ValueSite, heads_of


@dataclass(frozen=True)
class Refusal:
    """A place that looks prunable but is not supported. It is not pruned, and a recipe that requests it warns."""

    name: str
    kind: str
    reason: str


Finding: TypeAlias = Site | Refusal


@dataclass(frozen=True)
class Layer:
    """A layer of the model with its state, "pruned", "refused" or "outside", and why it is not pruned."""

    name: str
    params: int
    state: str
    reason: str = ""


class Sites(Tabular):
    """What was found in a model: iterate over it for the sites, `refused` holds the rest.

    `layers` accounts for every layer of the model; `proven` are the names of sites that were verified on it.
    """

    def __init__(
        self,
        found: list[Site],
        refused: list[Refusal] | None = None,
        adapter: str = "",
        output: OutputHead | None = None,
        layers: tuple[Layer, ...] = (),
        proven: frozenset[str] = frozenset(),
    ) -> None:
        self.refused = tuple(refused or ())
        self.output = output
        self.adapter = adapter
        self.layers = layers
        self.proven = proven
        self._by_name: dict[str, Site] = {}
        for site in found:
            if site.name in self._by_name:
                raise ModelError(f"the adapter {adapter!r} names two sites {site.name!r}; site names must be unique")
            self._by_name[site.name] = site

    def __iter__(self) -> Iterator[Site]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Site:
        return self._by_name[name]

    def refusing(self, sites: Iterable[Site], reason: str) -> Sites:
        """The sites without these, which are refused for this reason."""
        lost = {site.name: Refusal(site.name, site.kind, reason) for site in sites}
        kept = [site for site in self if site.name not in lost]
        refused = [*self.refused, *lost.values()]
        return Sites(kept, refused, self.adapter, self.output, self.layers, self.proven - set(lost))

    def replacing(self, sites: Mapping[str, Site]) -> Sites:
        """The sites with these in place of those of the same names."""
        found = [sites.get(site.name, site) for site in self]
        return Sites(found, list(self.refused), self.adapter, self.output, self.layers, self.proven)

    def get(self, name: str) -> Site | None:
        return self._by_name.get(name)

    @property
    def mlp(self) -> list[MLPSite]:
        return [site for site in self if isinstance(site, MLPSite)]

    @property
    def attention(self) -> list[AttentionSite]:
        return [site for site in self if isinstance(site, AttentionSite)]

    @property
    def values(self) -> list[ValueSite]:
        return [site for site in self if isinstance(site, ValueSite)]

    def coverage(self) -> dict[str, float]:
        """The shares of the model's parameters in layers that are pruned, refused, and outside."""
        total = sum(layer.params for layer in self.layers) or 1
        return {
            state: sum(layer.params for layer in self.layers if layer.state == state) / total
            for state in ("pruned", "refused", "outside")
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "coverage": self.coverage(),
            "sites": [
                {"name": s.name, "kind": s.kind, "width": s.width, "heads": getattr(s, "heads", None)} for s in self
            ],
            "refused": [{"name": r.name, "kind": r.kind, "reason": r.reason} for r in self.refused],
        }

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """One row per site; those that cannot be pruned come last."""
        rows: list[tuple[str, ...]] = []
        for site in self:
            heads = f"{count} heads x " if (count := heads_of(site)) else ""
            rows.append((site.name, site.kind, f"{heads}{site.width}"))
        rows += [(r.name, r.kind, f"cannot be pruned: {r.reason}") for r in self.refused]
        return f"{len(self)} sites ({self.adapter})", ("site", "kind", "width"), rows
