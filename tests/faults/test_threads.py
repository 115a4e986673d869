"""One model object, several threads: what others do with it enters no sum, and what they compute stays right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import nn

import corp
from corp import Recipe, Result
from corp.calibration.batches import without_cache
from tests.helpers.models import batches, build, run

RECIPE = Recipe(mlp=0.5, attn=0.5, ridge=1e-2)
pytestmark = pytest.mark.filterwarnings("ignore:.*a stable fit needs:corp.errors.CorpWarning")


class Meeting:
    """Batches that are handed out when all threads have come for one, so that forward passes alternate."""

    def __init__(self, data: list[Any], barrier: threading.Barrier) -> None:
        self.data, self.barrier = data, barrier
        self.samples = sum(len(next(iter(b.values())) if isinstance(b, dict) else b) for b in data)

    def __iter__(self) -> Any:
        for batch in self.data:
            with suppress(threading.BrokenBarrierError):  # the other one is done
                self.barrier.wait(2)
            yield batch


def same(ours: Result, theirs: Result) -> bool:
    """The same dimensions are kept, and weights agree to 1e-6: torch.nn has two paths that round differently."""
    states = ours.model.state_dict(), theirs.model.state_dict()
    kept = [[site.kept for site in result.plan.sites] for result in (ours, theirs)]
    return kept[0] == kept[1] and all(torch.allclose(states[0][n], states[1][n], atol=1e-6) for n in states[0])


def dropping(family: str) -> nn.Module:
    """In train mode, with dropout that shows if it is ever on."""
    model = build(family, torch.float64).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    return model


@pytest.mark.parametrize("family", ["vit", "torch-encoder", "hf-bert"])
def test_two_prunes_of_one_model_give_what_they_give_alone(family: str) -> None:
    model = dropping(family)
    data = batches(family, 6, 8, torch.float64)
    parts = [data[:3], data[3:]]
    alone = [corp.prune(model, Meeting(part, threading.Barrier(1)), RECIPE) for part in parts]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(corp.prune, model, Meeting(part, barrier), RECIPE) for part in parts]
        together = [job.result() for job in jobs]
    assert all(same(a, b) for a, b in zip(alone, together, strict=True))
    assert all(module.training for module in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def serving(model: nn.Module, batch: Any, work: Callable[[], Any]) -> tuple[Any, list[torch.Tensor]]:
    """What `work` returns, and what another thread's calls of the model gave while it went on."""
    answers, done = [], threading.Event()

    def serve() -> None:
        while not done.is_set():
            answers.append(run(model, batch))

    server = threading.Thread(target=serve)
    server.start()
    try:
        return work(), answers
    finally:
        done.set()
        server.join(60)


@pytest.mark.parametrize("family", ["vit", "torch-encoder", "hf-opt"])
def test_a_model_that_serves_others_while_it_is_pruned(family: str) -> None:
    """Their answers are the dense model's, and their data is in no sum."""
    model = build(family, torch.float64)
    data, foreign = batches(family, 3, 8, torch.float64), batches(family, 4, 3, torch.float64)[3]
    wanted, expected = corp.prune(model, data, RECIPE), run(model, foreign)
    found, answers = serving(model, foreign, lambda: corp.prune(model, data, RECIPE))
    assert same(found, wanted)
    assert len(answers) > 3
    assert all(torch.allclose(answer, expected, atol=1e-5) for answer in answers)


def test_hooks_of_the_users_own_stay_and_see_what_passes() -> None:
    model, data = build("vit", torch.float64), batches("vit", 3, 8, torch.float64)
    wanted, seen = corp.prune(model, data, RECIPE), []
    handle = model.blocks[0].register_forward_hook(lambda _m, _a, _o: seen.append(1))
    found = corp.prune(model, data, RECIPE)
    assert same(found, wanted)
    assert len(seen) >= 3
    assert list(model.blocks[0]._forward_hooks) == [handle.id]


def test_caches_stay_off_until_the_last_one_that_needs_it_is_done() -> None:
    model = build("hf-opt")
    with ExitStack() as second:
        with without_cache(model):
            second.enter_context(without_cache(model))
        assert model.config.use_cache is False
    assert model.config.use_cache is True
