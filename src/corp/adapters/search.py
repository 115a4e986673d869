"""The search for sites: combines what adapters know with what structure shows, and verifies it on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from corp.adapters.alone import Found, try_alone, without
from corp.adapters.attention_names import Parts, attentions, is_vague, untaken, wrapped, wrapped_makers
from corp.adapters.examples import examples
from corp.adapters.head_layouts import head_rows
from corp.adapters.mlps import experts, mlps
from corp.adapters.multihead import KNOWN, multihead
from corp.adapters.notes import latent_attentions, noted, told_outside
from corp.adapters.scope import lone_blocks
from corp.adapters.sharing import why_shared
from corp.adapters.structure import Claim, claim_attention
from corp.adapters.verify import Outcome, first_ways, is_bare, joined, verify
from corp.adapters.wrappers import inside_wrappers, wrapped_mlps
from corp.calibration.batches import Forward, feed, require_runs
from corp.errors import CorpError, ModelError
from corp.sites import Finding, Refusal, Site, layers_of, module_of

UNREACHED = "nothing of the batch reaches it"
BYPASSED = f"{UNREACHED}, or its weights are used without calling it"


def search(
    model: nn.Module, known: Sequence[Finding], theirs: Sequence[str], batch: Any, forward: Forward | None
) -> Found:
    """Known findings, and claims about all other layers except those under the prefixes `theirs`."""
    fixed: list[Site] = [told_outside(model, one) for one in known if not isinstance(one, Refusal)]
    refused = [one for one in known if isinstance(one, Refusal)]
    for one in _multiheads(model, fixed, refused, theirs):
        if isinstance(one, Refusal):
            refused.append(one)
        else:
            fixed.append(one)
    by_name = attentions(model)
    claims = list(_claims(model, by_name.values(), fixed, theirs))
    refused += [refusal for claim in claims for refusal in claim.refused]
    odd_makers = list(wrapped_makers(model, by_name))
    refused += [*latent_attentions(model), *_unspoken(wrapped(model, odd_makers), refused)]
    homes = [*(claim.parts.name for claim in claims), *(module_of(site) for site in fixed if site.kind != "mlp")]
    taken = {name for site in (*fixed, *first_ways(claims)) for name in layers_of(site)}
    taken |= {claim.parts.full(path) for claim in claims for path, _ in claim.parts.makers}
    taken |= {claim.parts.down for claim in claims if claim.parts.down}
    taken |= set(_under(model, [*theirs, *(f"{r.name}." for r in refused if r.kind == "mlp")]))
    within = [*homes, *(r.name for r in refused if r.kind == "attn")]
    refused += [r for r in wrapped_mlps(model, within) if r.name not in taken]
    taken |= set(_under(model, list(inside_wrappers(model, odd_makers))))
    routed = list(experts(model))
    taken |= {name for one in routed if not isinstance(one, Refusal) for name in layers_of(one)}
    for one in (*routed, *mlps(model, taken, lone_blocks(homes))):
        if isinstance(one, Refusal):
            refused.append(one)
        else:
            fixed.append(noted(model, one))
    shared = why_shared(model, [*fixed, *first_ways(claims)])
    refused += [Refusal(*place, reason) for place, reason in shared.items()]
    claims = [left for claim in claims if (left := without(claim, set(shared))).qk or left.vo]
    fixed = [site for site in fixed if (site.name, site.kind) not in shared]
    found = _tried(model, claims, fixed, batch, forward)
    found.refused = _only_once([*refused, *found.refused], found.sites)
    found.sites = _ordered(model, joined(found.sites))
    return found


def _multiheads(
    model: nn.Module, fixed: Sequence[Site], refused: Sequence[Refusal], theirs: Sequence[str]
) -> list[Finding]:
    """Every nn.MultiheadAttention that no adapter has reported."""
    known = {module_of(site) for site in fixed} | {r.name for r in refused} | set(_under(model, theirs))
    return [
        one
        for name, module in model.named_modules()
        if type(module) in KNOWN and name not in known
        for one in multihead(name, module)
    ]


def _claims(model: nn.Module, found: Iterable[Parts], fixed: Sequence[Site], theirs: Sequence[str]) -> Iterator[Claim]:
    taken = {name for site in fixed for name in layers_of(site)} | set(_under(model, theirs))
    for parts in untaken(found, taken):
        if is_vague(parts) and not head_rows(model, parts):
            continue  # a state-space layer, not an attention
        yield claim_attention(model, parts, lambda site: noted(model, site))


def _under(model: nn.Module, prefixes: Sequence[str]) -> Iterator[str]:
    return (name for name, _ in model.named_modules() if any(name.startswith(prefix) for prefix in prefixes))


def _unspoken(found: Iterable[Refusal], refused: Sequence[Refusal]) -> list[Refusal]:
    """Those of modules about which no adapter has said anything."""
    known = {r.name for r in refused if r.kind == "attn"}
    return [r for r in found if (r.name if r.kind == "attn" else r.name.rpartition(".")[0]) not in known]


def _only_once(refused: Sequence[Refusal], sites: Sequence[Site]) -> list[Refusal]:
    """One refusal per place, and none if another way to prune it was found."""
    found = {(site.name, site.kind) for site in sites}
    by_place = {(r.name, r.kind): r for r in refused}  # the last one is the most specific
    return [r for place, r in by_place.items() if place not in found]


def _ordered(model: nn.Module, sites: Sequence[Site]) -> list[Site]:
    """The sites in the order of the model's layers; queries before values before the MLP."""
    position = {name: i for i, (name, _) in enumerate(model.named_modules())}
    kinds = ("attn", "vo", "mlp")
    return sorted(sites, key=lambda s: (position[layers_of(s)[0]], position.get(module_of(s), 0), kinds.index(s.kind)))


def _tried(model: nn.Module, claims: list[Claim], fixed: list[Site], batch: Any, forward: Forward | None) -> Found:
    found = Found()
    if not any(parameter.is_meta for parameter in model.parameters()):
        for run in _runs(model):
            if not claims and not fixed:
                break
            claims, fixed = _try(model, run, claims, fixed, found)
        claims, fixed = try_alone(model, claims, fixed, found)
        if batch is not None:
            # What loading, which has no batch, would find.
            claims = [Claim(claim.parts, claim.qk[:1], claim.vo[:1]) for claim in claims]
            fixed, found.sites, found.proven = [*fixed, *found.sites], [], set()
            claims, fixed = _try_batch(model, batch, forward, claims, fixed, found)
    found.sites += [*fixed, *first_ways(claims)]
    return found


def _try_batch(
    model: nn.Module, batch: Any, forward: Forward | None, claims: list[Claim], fixed: list[Site], found: Found
) -> tuple[list[Claim], list[Site]]:
    """The user's batch; one that the model does not run on is refused as such."""
    try:
        return _try(model, lambda: feed(model, batch, forward), claims, fixed, found, strict=True)
    except CorpError:
        raise
    except Exception as error:
        require_runs(model, batch, forward)
        raise ModelError(
            "sites are tried out with random numbers in place of what their layers make, and the model does not run "
            f"on those: {type(error).__name__}: {error}"
        ) from error


def _without_unmoved(outcome: Outcome, found: Found) -> tuple[list[Claim], list[Site]]:
    """What an example left open, except attentions that it reached without any effect: those are refused."""
    reason = "tried out on the model, other queries change nothing, so nothing can be said about them"
    found.refused += [Refusal(name, "attn", reason) for name in sorted(outcome.unmoved)]
    claims = [claim for claim in outcome.open if not {s.name for s in claim.qk} & outcome.unmoved]
    return claims, [site for site in outcome.open_sites if site.name not in outcome.unmoved]


def _runs(model: nn.Module) -> Iterator[Callable[[], Any]]:
    for module, batch in examples(model):
        yield partial(feed, module, batch)


def _try(
    model: nn.Module,
    run: Callable[[], Any],
    claims: list[Claim],
    fixed: list[Site],
    found: Found,
    *,
    strict: bool = False,
) -> tuple[list[Claim], list[Site]]:
    """Try one input; sites that it does not reach stay open. An example that the model does not accept is ignored."""
    try:
        outcome = verify(model, run, claims, fixed, packed=not strict)
    except CorpError:
        raise
    except Exception:
        if strict:
            raise
        return claims, fixed
    found.sites += outcome.sites
    found.refused += outcome.refused
    found.proven |= outcome.proven
    if not strict:
        return _without_unmoved(outcome, found)
    left = [*outcome.open_sites, *first_ways(outcome.open)]
    lost = [s for s in left if s.name in outcome.unreached and not _has_proven_fellow(s, outcome)]
    found.refused += [Refusal(s.name, s.kind, BYPASSED if is_bare(s) else UNREACHED) for s in lost]
    return [], [s for s in left if s not in lost]


def _has_proven_fellow(site: Site, outcome: Outcome) -> bool:
    """Whether another expert of the same module was verified, because all run the same code."""
    experts = getattr(site, "experts", None)
    return experts is not None and any(
        getattr(other, "experts", None) == experts and other.name in outcome.proven for other in outcome.sites
    )
