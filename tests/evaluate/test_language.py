"""Perplexity, agreement and KL of language models; embeddings, ranks and STS of encoders: against plain oracles."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from corp.data.sts import read_pairs
from corp.errors import CorpError, DataError, ModelError
from corp.evaluate import language
from corp.evaluate.language import IGNORED, NextTokens
from corp.evaluate.sentences import Embeddings, pool, ranks, spearman, sts_spearman
from corp.evaluate.tasks import run_tasks
from corp.measure.intervals import Mean
from tests.helpers.seeds import seeded


@pytest.fixture
def case() -> tuple[Tensor, Tensor, Tensor]:
    """Logits (6, 9, 11) of a model and of a dense one, and next tokens of which a third is not judged."""
    logits, dense = torch.randn(6, 9, 11), torch.randn(6, 9, 11)
    target = torch.randint(11, (6, 9))
    target[torch.rand(6, 9) < 0.3] = IGNORED
    target[2] = IGNORED  # a sequence without any judged token
    return logits, dense, target


def test_numbers_equal_those_of_plain_loops(case: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, dense, target = case
    metric = NextTokens()
    for rows in (slice(0, 4), slice(4, 6)):
        metric.add(SimpleNamespace(logits=logits[rows]), SimpleNamespace(logits=dense[rows]), target[rows])
    nll, before, kl, agree = [], [], [], []
    for b, t in (target != IGNORED).nonzero().tolist():
        q, p = logits[b, t].double().softmax(0), dense[b, t].double().softmax(0)
        nll.append(-math.log(q[target[b, t]]))
        before.append(-math.log(p[target[b, t]]))
        kl.append(float((p * (p / q).log()).sum()))
        agree.append(float(q.argmax() == p.argmax()))
    n = len(nll)
    found = metric.intervals()
    values = {name: interval.value for name, interval in found.items() if interval}
    assert values["perplexity"] == pytest.approx(math.exp(sum(nll) / n), rel=1e-5)
    assert values["perplexity_ratio"] == pytest.approx(math.exp((sum(nll) - sum(before)) / n), rel=1e-5)
    assert values["kl"] == pytest.approx(sum(kl) / n, rel=1e-5)
    assert values["agreement"] == pytest.approx(sum(agree) / n)
    assert 0 < sum(agree) < n  # else it would be too easy
    assert metric.nll.n == 5


def test_chunks_make_no_difference(case: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    logits, dense, target = case
    whole, parts = NextTokens(), NextTokens()
    whole.add(logits, dense, target)
    monkeypatch.setattr(language, "CHUNK", 33)  # three positions at a time
    parts.add(logits, dense, target)
    assert vars(parts.divergence) == pytest.approx(vars(whole.divergence))
    assert vars(parts.nll) == pytest.approx(vars(whole.nll))


def test_without_a_dense_model_there_is_perplexity_alone(case: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, target = case
    alone, itself = NextTokens(), NextTokens()
    alone.add(logits, None, target)
    itself.add(logits, logits, target)
    found = alone.intervals()
    assert found["perplexity"] == itself.intervals()["perplexity"]
    assert found["agreement"] is found["kl"] is found["perplexity_ratio"] is None
    assert itself.intervals()["agreement"] == (1.0, 1.0, 1.0)


def test_outputs_that_are_no_language_models(case: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, _, target = case
    with pytest.raises(ModelError, match=r"gives shape \(6, 9\)"):
        NextTokens().add(logits[..., 0], None, target)
    with pytest.raises(ModelError, match="vocabulary of 11 tokens and the dense model 10"):
        NextTokens().add(logits, logits[..., :10], target)
    with pytest.raises(ModelError, match="not finite"):
        NextTokens().add(logits / 0, None, target)
    nothing = NextTokens()
    nothing.add(logits, None, torch.full_like(target, IGNORED))
    with pytest.raises(DataError, match="no token was scored"):
        nothing.intervals()


def test_the_interval_over_sequences_covers_the_truth() -> None:
    draw = seeded(0)
    hits = 0
    for _ in range(400):
        # Tokens of a sequence share its own level, so 30 sequences are 30 samples however long they are.
        tokens = torch.randint(5, 50, (30,), generator=draw)
        levels = 2 + torch.randn(30, generator=draw)
        mean = Mean()
        mean.add(levels * tokens, tokens)
        _, low, high = mean.interval()
        hits += low <= 2 <= high  # type: ignore[operator]
    assert 0.90 <= hits / 400 <= 0.97


def test_pooling_counts_real_tokens_only() -> None:
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    pooled = pool(SimpleNamespace(last_hidden_state=hidden), mask)
    torch.testing.assert_close(pooled[0], hidden[0, :2].double().mean(0))
    torch.testing.assert_close(pooled[1], hidden[1].double().mean(0))
    with_head = SimpleNamespace(logits=hidden, hidden_states=(hidden * 0, hidden))
    torch.testing.assert_close(pool(with_head, mask), pooled)
    with pytest.raises(ModelError, match="no hidden states"):
        pool(SimpleNamespace(logits=hidden), mask)


def test_cosine_to_the_dense_embedding() -> None:
    ones, mask = torch.ones(1, 2, 2), torch.ones(1, 2)
    turned = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    metric = Embeddings()
    metric.add(SimpleNamespace(last_hidden_state=turned), SimpleNamespace(last_hidden_state=ones), mask)
    assert metric.cosine.total == pytest.approx(math.sqrt(0.5))
    with pytest.raises(ModelError, match="width 1 and 2"):
        metric.add(SimpleNamespace(last_hidden_state=ones[..., :1]), SimpleNamespace(last_hidden_state=ones), mask)


def test_spearman_equals_scipy_with_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.randint(8, (60,)).double(), torch.randn(60)
    b += 0.3 * a
    assert spearman(a, b).value == pytest.approx(stats.spearmanr(a, b).statistic)
    assert ranks(a).tolist() == pytest.approx(stats.rankdata(a).tolist())
    value, low, high = spearman(a, b)
    assert low is not None
    assert high is not None
    assert low < value < high
    assert spearman(a, a.exp()) == (1.0, 1.0, 1.0)
    assert spearman(a, -a).value == -1.0


def test_rank_correlations_that_are_not_defined() -> None:
    with pytest.raises(DataError, match="all equal"):
        spearman(torch.ones(5), torch.arange(5.0))
    with pytest.raises(DataError, match="at least four"):
        spearman(torch.ones(3), torch.arange(3.0))


def test_sts_pairs_are_neighbouring_rows() -> None:
    angles = torch.tensor([0.1, 0.9, 0.4, 0.2, 1.3])
    first, second = torch.zeros(5), angles
    rows = torch.stack([first, second], 1).flatten()
    embeddings = torch.stack([rows.cos(), rows.sin()], 1)
    assert sts_spearman(embeddings, -angles).value == pytest.approx(1.0)  # the wider the angle, the less alike


def test_sts_files(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('g\tf\ty\t1\t2.5\tA "girl.\tA boy.\ng\tf\ty\t2\t5.0\tA dog.\tA dog, too.\n')
    pairs = read_pairs(path)
    assert pairs.sentences == ['A "girl.', "A boy.", "A dog.", "A dog, too."]
    assert pairs.scores.tolist() == [2.5, 5.0]
    path.write_text('sentence2,score,sentence1\n"b, or c",1,a\n')
    assert read_pairs(path).sentences == ["a", "b, or c"]
    path.write_text("g\tf\ty\t1\tmuch\ta\tb\n")
    with pytest.raises(DataError, match=r"line 1: no score in column 5 and sentences in columns 6 and 7"):
        read_pairs(path)
    path.write_text("score,sentence1,sentence2\n1,a, \n")
    with pytest.raises(DataError, match="line 2: a sentence is empty"):
        read_pairs(path)
    path.write_text("")
    with pytest.raises(DataError, match="is empty"):
        read_pairs(path)


def test_tasks_hand_the_model_in_memory_to_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    class HFLM:
        def __init__(self, **kwargs: object) -> None:
            self.kwargs = kwargs

    def simple_evaluate(model: HFLM, tasks: list[str], limit: int | None) -> dict[str, object]:
        if "nonsense" in tasks:
            raise KeyError("nonsense")
        seen.update(model.kwargs, tasks=tasks, limit=limit)
        return {"results": {"arc": {"alias": "arc", "acc,none": 0.25, "acc_stderr,none": 0.01}}}

    package, models, inner = ModuleType("lm_eval"), ModuleType("models"), ModuleType("huggingface")
    package.simple_evaluate, inner.HFLM = simple_evaluate, HFLM  # type: ignore[attr-defined]
    for name, module in (("", package), (".models", models), (".models.huggingface", inner)):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", module)
    model = nn.Linear(1, 1)
    assert run_tasks(model, "tok", ["arc"], limit=3) == {"arc": {"acc": 0.25, "acc_stderr": 0.01}}
    assert seen["pretrained"] is model
    assert (seen["tokenizer"], seen["tasks"], seen["limit"]) == ("tok", ["arc"], 3)
    with pytest.raises(DataError, match="lm-eval cannot run nonsense"):
        run_tasks(model, "tok", ["nonsense"])


def test_tasks_without_lm_eval_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(CorpError, match="pip install lm-eval"):
        run_tasks(nn.Linear(1, 1), None, ["arc"])
