"""The search for widths by trials: models are made from the fitted statistics and compared on held-out batches.

Nothing is trained. To save time, trial models are not refitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from corp.calibration.batches import Forward, size_of
from corp.calibration.holdout import HeldBatches
from corp.errors import DataError, ModelError
from corp.measure.closeness import Reader, Reference
from corp.recipe import Recipe
from corp.sites import Sites
from corp.steps.allocation.agreement import STEPS, Agreement
from corp.steps.allocation.allocator import Allocation, Allocator, Way
from corp.steps.allocation.output_head import MOST_OUTPUT
from corp.steps.allocation.split import MOST_QUERIES, OUTPUT_STEP, QUERY_STEP, SPREADS, WAYS, Split, least_output
from corp.steps.allocation.trials import Trials

AGREEMENT_SAMPLES = 512  # held out for min_agreement: 95 % is then known to within two points
SPLIT_SAMPLES = 128  # enough to compare Q/K shares, of one answer each
TEXTS, TEXT_TOKENS = 8, 4096  # the same of texts, which have an answer at every token: at least so many, and so long
TOKENS_PER_CHANNEL = 32  # with fewer, exact elimination is compared with the paper's ranking
STRONGER = 10.0  # times the ridge, tried if tokens are few
CLEARLY = 0.85  # times the divergence of the paper's ranking, which exact elimination must reach if tokens are few
RANKINGS = 4  # combinations of ranking and ridge that are compared if tokens are few
USUAL = 3  # usual steps of a search for one share
USUAL_SPREADS = 2  # usual number of spreads that are tried
JUDGED_AT = 0.75  # of the parameters, if the target is not known yet


def samples_needed(recipe: Recipe, answers: int = 1) -> int:
    """How many held-out samples with so many answers a search under this recipe needs; 0 if there is nothing to try."""
    if recipe.min_agreement is not None:
        return AGREEMENT_SAMPLES
    if not (recipe.searches or _doubtful(recipe)):
        return 0
    return SPLIT_SAMPLES if answers == 1 else min(SPLIT_SAMPLES, max(TEXTS, math.ceil(TEXT_TOKENS / answers)))


def usual_trials(recipe: Recipe, sites: Sites, tokens: Mapping[str, int]) -> int:
    """About how many models a search makes, from the tokens that are fitted at every site."""
    few = any(tokens[site.name] < TOKENS_PER_CHANNEL * site.width for site in sites.mlp if not recipe.skips(site.name))
    judged = RANKINGS if few and _doubtful(recipe) else 0
    if recipe.min_agreement is not None:
        return judged + STEPS
    climbed = USUAL * (2 if sites.output and recipe.output is None else 1)
    return judged + (WAYS + USUAL_SPREADS + climbed + 1 if recipe.searches else 0)


def most_trials(recipe: Recipe) -> int:
    """The largest number of models that a search makes."""
    if recipe.min_agreement is not None:
        return STEPS + 1
    steps = MOST_QUERIES / QUERY_STEP + MOST_OUTPUT / OUTPUT_STEP
    # One step may go the wrong way, and equal shares are tried too.
    return RANKINGS + WAYS + len(SPREADS) + math.ceil(steps) + 1 + 1


def search(allocator: Allocator, held: HeldBatches | None, forward: Forward | None = None) -> tuple[Recipe, Allocation]:
    """The allocator's recipe with its open settings resolved, and the widths, by trials on held-out batches."""
    if held is not None and not held.batches:
        held = None
    recipe, observer = allocator.recipe, allocator.observer
    searches = recipe.searches  # whatever ranking is chosen below
    if recipe.min_agreement is not None and held is None:
        raise DataError("min_agreement holds some batches out, so it takes at least two; use smaller batches")
    scarce = held is not None and _doubtful(recipe) and _scarce(allocator)
    if held is None or not (searches or scarce):  # a single batch: the rules decide, as in corp.plan
        return recipe, allocator.allocate(recipe)
    with observer.stage("trying widths", most_trials(recipe), "models") as advance:
        try:
            reader = held.reader if isinstance(held.reader, Reader) else None
            reference = Reference(allocator.model, held.batches, forward, reader=reader, known=held.outputs)
        except ModelError as error:
            if searches:
                raise
            why = {"notes": [f"the rankings were not compared: {error}"]}
            return recipe, allocator.allocate(recipe)._replace(why=why)
        trials = Trials(allocator, recipe, reference, sum(map(size_of, held.batches)), advance)
        note: dict[str, list[str]] = {}
        if scarce:
            trials, note = _judged(trials)
            recipe = trials.recipe
        if recipe.min_agreement is not None:
            recipe, found = Agreement(trials).run(recipe.min_agreement)
        else:
            found = Split(trials).run() if searches else trials.allocator.allocate(recipe)
    return recipe, found._replace(why={**found.why, **note})


def _doubtful(recipe: Recipe) -> bool:
    """Whether the choice of MLP channels needs more data than a ranking does."""
    return recipe.rank == "exact" and recipe.compensate == "full"


def _scarce(allocator: Allocator) -> bool:
    """Whether some MLP that is pruned saw too few tokens per channel for exact elimination to be trusted."""
    stats = allocator.stats
    pruned = [site for site in allocator.sites.mlp if not allocator.recipe.skips(site.name)]
    return any(stats.moments_of(site.name).fit.n < TOKENS_PER_CHANNEL * site.width for site in pruned)


def _judged(trials: Trials) -> tuple[Trials, dict[str, list[str]]]:
    """Trials under the ranking and ridge whose model is closest to the dense one on held-out batches.

    With few tokens per channel exact elimination overfits the sample, the paper's ranking less so. Held-out batches
    resemble the sample, so if both are about equally close, the paper's ranking is safer on other data.
    """
    first, asked = trials.allocator, trials.recipe
    rule = replace(asked, min_agreement=None, target_params=JUDGED_AT) if asked.min_agreement is not None else asked
    output = least_output(first, rule) if rule.searches else None
    found = first.allocate(rule, Way(spread=SPREADS[-1], output=output))  # MLPs lose about the same share, as usual
    known: dict[tuple[str, float], float] = {}
    stronger = Allocator(
        first.model, first.sites, first.stats, replace(asked, ridge=STRONGER * asked.ridge), first.observer, first.given
    )
    for rank, ridge in product((asked.rank, "combined"), (asked.ridge, STRONGER * asked.ridge)):
        if found.paths and (rank, ridge) == (asked.rank, stronger.recipe.ridge):
            found = found._replace(paths={name: curve.path for name, curve in stronger.curves().items() if curve.path})
        tried = replace(trials, recipe=replace(asked, rank=rank, ridge=ridge)).compare(found)
        known[rank, ridge] = tried.divergence().value
        first.observer.note(f"rank {rank}, ridge {ridge:g}: divergence {known[rank, ridge]:.3f}")
    rank, ridge = min(known, key=lambda key: known[key] * (CLEARLY if key[0] == "combined" else 1.0))
    if (rank, ridge) == (asked.rank, asked.ridge):
        return trials, {}
    note = (
        f"there are few tokens per MLP channel, so rankings were compared on held-out batches: rank={rank!r} with "
        f"ridge={ridge:g} is about as close to the dense model as rank={asked.rank!r} with ridge={asked.ridge:g}, "
        f"or closer, and was used; calibrate on more data"
    )
    recipe = replace(asked, rank=rank, ridge=ridge)
    allocator = first if ridge == asked.ridge else stronger  # error curves depend on the ridge, not on the ranking
    return replace(trials, allocator=allocator, recipe=recipe), {"notes": [note]}
