"""The models that corp bench times, and why one gained less than its arithmetic promises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from corp.adapters.registry import find_sites
from corp.calibration.batches import placement
from corp.cli.models import load_model, place
from corp.errors import CorpError, ModelError
from corp.measure import timing
from corp.recipe import FAST, ROUNDING_KEYS
from corp.sites import AttentionSite, Site
from corp.storage import folder as storage
from corp.storage.rebuilding import rebuild
from corp.surgery.apply import history

# Per kind: its name in --round-to, and the width that kernels take whole.
TILES = {kind: (key, FAST[key]) for kind, key in ROUNDING_KEYS.items()}


@dataclass(frozen=True)
class Contender:
    """A model to time; `dense_widths` are those its pruned sites had once."""

    name: str
    model: nn.Module
    dense_widths: dict[str, int]


def gather(names: list[str], device: str, dtype: str) -> list[Contender]:
    """The models by name, placed; a lone pruned folder comes after its dense base."""
    if len(names) == 1 and (Path(names[0]) / storage.MANIFEST).is_file():
        folder = Path(names[0])
        try:
            base = rebuild(storage.read_manifest(folder)["base"], folder)
        except CorpError as error:
            raise ModelError(
                f"{error}. To time it against another model give both: corp bench DENSE {folder}"
            ) from error
        dense = Contender("dense base", place(base.eval(), device, dtype), {})
        return [dense, _contender(names[0], device, dtype)]
    return [_contender(name, device, dtype) for name in names]


def _contender(name: str, device: str, dtype: str) -> Contender:
    model = load_model(name, None, pretrained=False)
    before = {site.name: site.width for plan in reversed(history(model)) for site in plan.sites}
    return Contender(name, place(model, device, dtype), before)


def explain(contender: Contender, times: timing.Times, gain: timing.Gain) -> list[str]:
    """Why pruning helps less than its MACs promise: causes that shapes and times show, each with its remedy."""
    sites = find_sites(contender.model)
    changed = [s for s in sites if s.width < contender.dense_widths.get(s.name, s.width)]
    values = {site.attention: site.width for site in sites.values}
    narrow = [(s, values.get(s.name, contender.dense_widths.get(s.name, s.width))) for s in sites.attention]
    texts = [*_unequal_widths(contender, [pair for pair in narrow if pair[0].width != pair[1]]), *_odd_widths(changed)]
    if timing.launch_bound(times, gain):
        texts.append(
            f"batch 1 is limited by kernel launches, not by arithmetic: MACs fell {gain.ideal:.2f}x, latency "
            f"{gain.latency.value:.2f}x, and a sample takes {1e3 * times.alone:.2f} ms alone but "
            f"{1e3 * times.together:.2f} ms in a batch of {times.batch}; larger batches, torch.compile or CUDA graphs "
            "help there, narrower layers do not"
        )
    return [f"{contender.name}: {text}" for text in texts]


def _unequal_widths(contender: Contender, narrow: list[tuple[AttentionSite, int]]) -> Iterator[str]:
    """What surgery.attention.attend has to do for values of another width than queries and keys."""
    if not narrow:
        return
    on_cuda = placement(contender.model)[0].type == "cuda"
    does = "the flash kernel needs equal widths, so the slower memory-efficient one runs"
    pads = "the fused kernel needs equal widths, so narrow heads are padded and their product is not cheaper"
    (first, values), *_ = narrow
    yield (
        f"{_some([site for site, _ in narrow])}: q/k of {first.width} beside v of {values}: "
        f"{does if on_cuda else pads}; only the projections are cheaper. Prune with --equal-heads for one width"
    )


def _odd_widths(changed: list[Site]) -> Iterator[str]:
    for kind, (key, tile) in TILES.items():
        if odd := [site for site in changed if site.kind == kind and site.width % tile]:
            fact = f"width {odd[0].width} is not a multiple of {tile}, so kernels run partly filled tiles"
            yield f"{_some(odd)}: {fact}; prune with --round-to {key}={tile}"


def _some(sites: Sequence[Site]) -> str:
    return sites[0].name + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")
