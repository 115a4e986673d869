"""Whether an attention is causal, tried out on the model: do earlier positions notice other keys at later ones?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from corp.adapters.attention_names import CROSS
from corp.adapters.proof import Trial, distance
from corp.adapters.symmetry import Change, Changing, noise
from corp.sites import AttentionSite, Rows, Site

Cut = Callable[[int], int]
CUTS: tuple[Cut, ...] = (lambda n: n // 2, lambda n: n - 1)  # two: sequences in one row may meet at the first


def with_causality(
    sites: Sequence[Site], base: Trial, attempt: Callable[[Sequence[Site], Changing], Trial], at: Callable[[Site], str]
) -> list[Site]:
    """The sites, with the causality that attentions found by structure show when later keys are replaced.

    `base` is the trial without changes, `attempt` makes another one, and `at` names the layer where a site's effect is
    compared. If nothing shows, as for a single token, the causality that the names suggest stays.
    """
    open_ = [site for site in sites if isinstance(site, AttentionSite) and _can_show(site, base)]
    causal: dict[str, bool] = {}
    for cut in CUTS:
        trial = attempt(open_, partial(later_keys, cut=cut)) if open_ else base
        for site in open_:
            sees = _sees_later(site, cut, base, trial, at(site))
            causal |= {} if sees is None else {site.name: not sees}
        open_ = [site for site in open_ if causal.get(site.name)]
    return [
        replace(site, causal=causal[site.name]) if isinstance(site, AttentionSite) and site.name in causal else site
        for site in sites
    ]


def later_keys(site: Site, cut: Cut) -> list[tuple[Rows, Change]]:
    """Other keys from the position `cut` on."""
    if not isinstance(site, AttentionSite):
        return []
    dim = -2 if site.batch_first else 0

    def change(x: Tensor) -> Tensor:
        n = x.shape[dim]
        later = torch.arange(n, device=x.device) >= cut(n)
        shape = [1] * x.dim()
        shape[dim] = n
        return torch.where(later.view(shape), noise(f"{site.name}/later", x), x)

    return [(site.k, change)]


def _can_show(site: AttentionSite, base: Trial) -> bool:
    """Whether the trials found queries and keys of one sequence by structure; adapters know the others."""
    return site.padded and site.norm is None and not CROSS.search(site.attention) and _length(site, base) > 1


def _length(site: AttentionSite, base: Trial) -> int:
    """How many positions the keys have; 0 if none were made."""
    shape = base.made.get(site.k.module, ())
    return shape[-2 if site.batch_first else 0] if len(shape) > 1 else 0


def _sees_later(site: AttentionSite, cut: Cut, base: Trial, trial: Trial, at: str) -> bool | None:
    """Whether positions before the cut changed; None if none after it did, or positions are not told apart."""
    n = _length(site, base)
    early, late = [], []
    for old, new in zip(base.z.get(at, []), trial.z.get(at, []), strict=False):
        dims = [dim for dim in ((-2,) if site.batch_first else (0, -2)) if old.dim() > 1 and old.shape[dim] == n]
        if len(dims) != 1:
            return None
        early.append((old.narrow(dims[0], 0, cut(n)), new.narrow(dims[0], 0, cut(n))))
        late.append((old.narrow(dims[0], cut(n), n - cut(n)), new.narrow(dims[0], cut(n), n - cut(n))))
    if (distance(early) or 0) > base.limit:
        return True
    return False if (distance(late) or 0) > 3 * base.limit else None
