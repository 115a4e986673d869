"""The memory that the sums need, and the number of passes over the data that this requires."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from corp.calibration.grams import CAUSAL_BLOCKS, FOLD_BLOCK, folds_after
from corp.calibration.holdout import EVERY
from corp.calibration.moments import CHUNK
from corp.errors import StatisticsError
from corp.numerics.linalg import packed_size
from corp.sites import AttentionSite, OutputHead, Site

MARGIN = 0.75  # of the free memory: the forward pass and the fit need some as well
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def site_bytes(site: Site | OutputHead, samples: int | None) -> int:
    """The final size of one site's sums, including the held-out part; without `samples`, an upper bound."""
    if not isinstance(site, AttentionSite):
        return 2 * 8 * site.inputs**2
    entries = _entries(site, samples)
    held = None if entries is None else -(-entries // EVERY)
    pairs = 2 * 2 * 8 * site.heads * site.rotary.dims**2 if site.rotary else 0
    lengths = 2 * 8 * (site.heads + site.groups) * (site.width + 1) ** 2 if site.norm else 0
    return pairs + lengths + _gram_bytes(site, entries) + _gram_bytes(site, held)


def _entries(site: AttentionSite, samples: int | None) -> int | None:
    """An upper bound on entries: an attention that becomes causal by its calls counts as causal."""
    return None if samples is None else samples * (1 if site.causal is False else CAUSAL_BLOCKS)


def _gram_bytes(site: AttentionSite, entries: int | None) -> int:
    """The size of separate entries or, once that is smaller, of the sums of their Kronecker products."""
    width = site.plain_width
    if width == 0:
        return 0
    t, one = packed_size(width), 4 * (2 * site.heads * (packed_size(width) + width) + 2)
    if entries is not None and entries <= folds_after(width):
        return entries * one
    return 2 * 8 * site.heads * t * t + FOLD_BLOCK * one


def working_bytes(sites: Sequence[Site | OutputHead], samples: int | None = None) -> int:
    """The additional memory of one site's update: float32 products and centred tokens, or entries of a first fold."""
    needs = [0]
    for site in sites:
        if not isinstance(site, AttentionSite):
            needs.append(4 * site.inputs**2 + 8 * CHUNK * site.inputs)
        elif (entries := _entries(site, samples)) is None or entries > folds_after(site.plain_width):
            needs.append(_gram_bytes(site, folds_after(site.plain_width)))
    return max(needs)


def passes(sites: Sequence[Site | OutputHead], samples: int | None, budget: int) -> list[list[Site | OutputHead]]:
    """The sites in groups, in order, so that the sums of a group stay within `budget` bytes."""
    working = working_bytes(sites, samples)
    least = working + max(site_bytes(site, samples) for site in sites)
    if least > budget:
        raise StatisticsError(
            f"calibration needs at least {human(least)} for its largest site, but {human(budget)} is allowed; give "
            f"memory={human(least)} or skip large sites"
        )
    groups: list[list[Site | OutputHead]] = [[]]
    used = working
    for site in sites:
        need = site_bytes(site, samples)
        if groups[-1] and used + need > budget:
            groups.append([])
            used = working
        groups[-1].append(site)
        used += need
    return groups


def free_bytes(device: torch.device) -> int:
    """The usable memory of the device that holds the sums, with a margin."""
    if device.type == "cuda":
        return int(MARGIN * torch.cuda.mem_get_info(device)[0])
    free = _available()
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, int(text) - used)
    return int(MARGIN * max(0, free))


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # if the kernel does not report it


def parse_bytes(text: str) -> int:
    """ "4GB", "500 MiB", "1.5g" or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if not found:
        raise StatisticsError(f"{text!r} is not an amount of memory; write for example 4GB or 500MB")
    return int(float(found[1]) * UNITS[found[2]])


def human(count: float) -> str:
    """1536 -> "1.5KB"; rounded up, so that a stated minimum suffices."""
    if count < 1024:
        return f"{int(count)}B"
    power = min(4, int(math.log(count, 1024)))
    return f"{math.ceil(10 * count / 1024**power) / 10:.1f}{' KMGT'[power]}B"
