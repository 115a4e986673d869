"""From claims to sites: alternatives are tried one after the other; a failure is refused with its difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from corp.adapters.causality import with_causality
from corp.adapters.mlps import packings
from corp.adapters.proof import Run, Trial, attempt, difference, distance, places_of, same_output
from corp.adapters.reasons import ESCAPED, NO_KERNEL, why_failed
from corp.adapters.structure import Claim
from corp.adapters.symmetry import Changing, made_by, other_queries, transformed
from corp.sites import AttentionSite, MLPSite, Refusal, Site, ValueSite, module_of
from corp.surgery.padded import Padded


@dataclass
class Outcome:
    """Sites and refusals; `open` are claims that the run could not decide, `proven` the names of verified sites.

    `unreached` are sites that the run did not reach, `unmoved` attentions that do not change with other queries.
    """

    sites: list[Site] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    open: list[Claim] = field(default_factory=list)
    open_sites: list[Site] = field(default_factory=list)
    proven: set[str] = field(default_factory=set)
    unreached: set[str] = field(default_factory=set)
    unmoved: set[str] = field(default_factory=set)


def verify(
    model: nn.Module, run: Run, claims: Sequence[Claim], fixed: Sequence[Site], *, packed: bool = False
) -> Outcome:
    """Verify the claims and the sites `fixed` on the input that `run` passes through the model.

    With `packed`, an MLP with packed gate and up is tried in every possible packing.
    """
    bare = [site for site in fixed if is_bare(site)]
    work = _Work(model, run, claims, [site for site in fixed if not is_bare(site)], bare, packed)
    outcome = Outcome()
    for site in bare:
        reached = module_of(site) in work.base.ran
        (outcome.sites if reached else outcome.open_sites).append(site)
        outcome.unreached |= set() if reached else {site.name}
    if not work.at_once(outcome):
        work.values(outcome)
        work.queries(outcome)
        work.together(outcome)
    outcome.sites = with_causality(outcome.sites, work.base, work.attempt, work.at)
    return outcome


def is_bare(site: Site) -> bool:
    """Whether the site is an nn.MultiheadAttention, known by its class, which calls no layer that could be observed."""
    return (isinstance(site, AttentionSite) and site.q.bare) or (isinstance(site, ValueSite) and site.v.bare)


class _Work:
    def __init__(
        self,
        model: nn.Module,
        run: Run,
        claims: Sequence[Claim],
        fixed: Sequence[Site],
        bare: Sequence[Site],
        packed: bool,
    ) -> None:
        self.model, self.run, self.claims, self.fixed = model, run, list(claims), list(fixed)
        self.packed = packed
        self.downs = {s.attention: s.down for s in fixed if isinstance(s, ValueSite)}
        self.downs |= {claim.parts.name: claim.parts.down for claim in claims if claim.parts.down}
        every: list[Site] = [*fixed]
        for claim in claims:
            every += [*claim.qk, *claim.vo]
        places = places_of(model, every, self.downs)
        self.places = replace(places, attentions=(*places.attentions, *map(module_of, bare)))
        self.base = self.attempt([])
        self.limit = self.base.limit
        self.control = self.base
        self.chosen: dict[str, Padded] = {}  # attention -> the layout that its values verified

    def attempt(self, sites: Sequence[Site], change: Changing = transformed) -> Trial:
        return attempt(self.model, self.run, self.places, sites, change)

    def at(self, site: Site) -> str:
        return self.downs.get(site.attention, site.attention) if isinstance(site, AttentionSite) else site.down

    def at_once(self, outcome: Outcome) -> bool:
        """Try everything in one pass, which is enough if the likeliest alternative of everything is right."""
        every = [*self.fixed, *first_ways(self.claims)]
        trial = self.attempt(every)
        by_attention = {s.attention: s for s in every if isinstance(s, ValueSite)}
        judged = [(s, by_attention.get(s.attention, s) if isinstance(s, AttentionSite) else s) for s in every]
        claimed = {s.name for s in first_ways(self.claims) if isinstance(s, AttentionSite)}
        if not all(self._agrees(judge, trial) and not _unreadable(site, trial) for site, judge in judged):
            return False
        found_by_structure = [s for s in every if isinstance(s, AttentionSite) and s.padded]
        control = self.attempt(found_by_structure, other_queries) if found_by_structure else self.base
        sensitive = all(self._changes(s, control) for s in found_by_structure if s.name in claimed)
        if not self._apart(every, trial) or not sensitive:
            return False
        self.control = control
        for site in every:
            self._accept(site, outcome, trial)
        return True

    def _agrees(self, site: Site, trial: Trial) -> bool:
        found = difference(site, self.at(site), self.base, trial)
        return found is not None and found <= self.limit

    def _changes(self, site: Site, control: Trial) -> bool:
        """Whether other queries and keys change this attention; otherwise a trial is meaningless."""
        return (difference(site, self.at(site), self.base, control) or 0) > 3 * self.limit

    def _batch_first(self, site: AttentionSite) -> bool:
        """Whether samples are on the first axis of queries; otherwise half of that axis is not half of the samples.

        In that case the last sample changes, and the second axis is as long as the batch.
        """
        shape = self.base.made.get(site.q.module, ())[:2]
        before, after = (trial.z.get(self.at(site), []) for trial in (self.base, self.control))
        if len(shape) < 2 or shape[0] < 2:
            return True
        fits = [pair for pair in zip(before, after, strict=False) if len(pair[0]) > 1 and _swapped(shape, pair[0])]
        return not any((distance([(old[-1], new[-1])]) or 0) > self.limit for old, new in fits)

    def values(self, outcome: Outcome) -> None:
        """Try MLPs and values, which do not depend on claims about queries and keys."""
        waiting: list[tuple[Claim | None, Sequence[Site]]] = [
            *((None, self._ways(site)) for site in self.fixed if not isinstance(site, AttentionSite)),
            *((claim, claim.vo) for claim in self.claims if claim.vo),
        ]
        self._rounds(waiting, outcome)

    def _ways(self, site: Site) -> Sequence[Site]:
        return packings(site) if self.packed and isinstance(site, MLPSite) else (site,)

    def queries(self, outcome: Outcome) -> None:
        waiting: list[tuple[Claim | None, Sequence[Site]]] = [
            (None, (site,)) for site in self.fixed if isinstance(site, AttentionSite)
        ]
        for claim in self.claims:
            ways = [s for s in claim.qk if _same_layout(s, self.chosen.get(claim.parts.name))]
            waiting += [(claim, ways)] if ways else []
        self.control = self.attempt([ways[0] for _, ways in waiting], other_queries) if waiting else self.base
        sensitive = [one for one in waiting if self._changes(one[1][0], self.control)]
        for one in waiting:
            if one not in sensitive:
                self._undecided(one[0], one[1][0], one[1], outcome)
        self._rounds(sensitive, outcome)

    def _rounds(self, waiting: list[tuple[Claim | None, Sequence[Site]]], outcome: Outcome) -> None:
        """In each round, try the next alternative of everything that is not verified yet."""
        best: dict[str, float] = {}
        problems: dict[str, str] = {}
        number = 0
        while waiting:
            now = [ways[number] for _, ways in waiting]
            trial = self.attempt(now)
            left = []
            for (claim, ways), site in zip(waiting, now, strict=True):
                found = difference(site, self.at(site), self.base, trial)
                if found is None or not all(rows.module in self.base.made for rows in made_by(site)):
                    self._undecided(claim, site, ways, outcome)
                elif found <= self.limit and _unreadable(site, trial) is None:
                    self._accept(site, outcome, trial)
                else:
                    if found <= self.limit and (problem := _unreadable(site, trial)):
                        problems[site.name] = problem
                    best[site.name] = min(found, best.get(site.name, found))
                    if number + 1 < len(ways):
                        left.append((claim, ways))
                    else:
                        reason = problems.get(site.name) or why_failed(self.model, site, best[site.name])
                        outcome.refused.append(Refusal(site.name, site.kind, reason))
            waiting, number = left, number + 1

    def _undecided(self, claim: Claim | None, site: Site, ways: Sequence[Site], outcome: Outcome) -> None:
        """Handle a site that was not reached or showed no effect, or whose layers are used without being called."""
        called = [rows.module in self.base.made for rows in made_by(site)]
        reached = self.at(site) in self.base.z
        ran = isinstance(site, AttentionSite | ValueSite) and site.attention in self.base.ran
        if any(called) != reached or (reached and not all(called)) or (ran and not reached):
            silent = [rows.module for rows, seen in zip(made_by(site), called, strict=True) if not seen]
            reason = f"{(silent or [self.at(site)])[0]} is used without being called, so nothing can be seen of it"
            outcome.refused.append(Refusal(site.name, site.kind, reason))
            return
        (outcome.unmoved if reached else outcome.unreached).add(site.name)
        if claim is None:
            outcome.open_sites.append(site)
        else:
            qk = tuple(way for way in ways if isinstance(way, AttentionSite))
            vo = tuple(way for way in ways if isinstance(way, ValueSite))
            outcome.open.append(Claim(claim.parts, qk, vo))

    def _accept(self, site: Site, outcome: Outcome, trial: Trial) -> None:
        if isinstance(site, AttentionSite) and site.padded and site.attention in trial.kernels:
            site = replace(site, scale=float(trial.kernels[site.attention][2]))
        if isinstance(site, AttentionSite) and site.padded and not self._batch_first(site):
            site = replace(site, batch_first=False)
        if isinstance(site, ValueSite) and isinstance(site.build, Padded):
            self.chosen[site.attention] = site.build
        outcome.sites.append(site)
        outcome.proven.add(site.name)

    def together(self, outcome: Outcome) -> None:
        """Try all verified sites at once: the inputs of other layers and the model's output must not change.

        Otherwise something else uses the outputs of the sites' layers.
        """
        tried = [site for site in outcome.sites if site.name in outcome.proven]
        for site in self._culprits(tried):
            outcome.sites.remove(site)
            outcome.proven.discard(site.name)
            outcome.refused.append(Refusal(site.name, site.kind, ESCAPED))

    def _culprits(self, sites: list[Site]) -> list[Site]:
        """The sites that cause a difference, found by halving."""
        if not sites or self._apart(sites, self.attempt(sites)):
            return []
        if len(sites) == 1:
            return sites
        half = len(sites) // 2
        return [*self._culprits(sites[:half]), *self._culprits(sites[half:])]

    def _apart(self, sites: Sequence[Site], trial: Trial) -> bool:
        """Whether the outputs of these sites reach only their own consuming layers."""
        own = {self.at(site) for site in sites if not isinstance(site, AttentionSite)}
        own |= {name for site in sites if isinstance(site, MLPSite) for name in site.between}
        others = [
            list(zip(z, trial.z.get(name, []), strict=False)) for name, z in self.base.z.items() if name not in own
        ]
        inside = tuple(f"{site.attention}." for site in sites if not isinstance(site, MLPSite))
        others += [
            list(zip(z, trial.passing.get(name, []), strict=False))
            for name, z in self.base.passing.items()
            if not name.startswith(inside)
        ]
        return same_output(self.base, trial) and all((distance(pairs) or 0) <= self.limit for pairs in others)


def _swapped(made: Sequence[int], taken: Tensor) -> bool:
    """Whether queries of shape (n, B, C) may be what a layer takes as (B, n, C), or in the same order."""
    return made[1] == len(taken) or tuple(made) == tuple(taken.shape[:2])


def _same_layout(site: AttentionSite, chosen: Padded | None) -> bool:
    return chosen is None or not isinstance(site.build, Padded) or site.build.v == chosen.v


def _unreadable(site: Site, trial: Trial) -> str | None:
    """Why the rotated queries of a site cannot be observed; None if they can or need not be."""
    if not isinstance(site, AttentionSite) or site.rotary is None or site.rotary.argument is not None:
        return None
    shapes = trial.kernels.get(site.attention)
    if shapes is None:
        return NO_KERNEL
    q, k, _ = shapes
    fits = len(q) == len(k) == 4 and q[1] == site.heads and q[3] == k[3] == site.width
    return None if fits and k[1] in (site.groups, site.heads) else NO_KERNEL


def first_ways(claims: Sequence[Claim]) -> list[Site]:
    """The likeliest alternative of every claim, used if nothing could be tried."""
    return [ways[0] for claim in claims for ways in (claim.qk, claim.vo) if ways]


def joined(sites: Sequence[Site]) -> list[Site]:
    """The sites, with the same layout for queries and values of one attention, which are narrowed together."""
    builds: dict[str, Any] = {s.attention: s.build for s in sites if isinstance(s, AttentionSite)}
    return [
        replace(s, build=builds[s.attention])
        if isinstance(s, ValueSite) and isinstance(s.build, Padded) and s.attention in builds
        else s
        for s in sites
    ]
