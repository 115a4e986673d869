"""Texts that a model writes itself: drawn from its distribution, the same for a seed, mixed with what was given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import corp
from corp.adapters import hf_models
from corp.data import text, written
from corp.errors import DataError, ModelError
from tests.helpers import decoders, hf_folders
from tests.helpers.command import content, failure, run
from tests.helpers.models import build

LENGTH = 24


def given(sequences: int = 6, length: int = LENGTH) -> text.TextBatches:
    spans = [text.Span(i * length, (i + 1) * length, i * length + 1) for i in range(sequences)]
    ids = torch.arange(sequences * length, dtype=torch.int32) % 300
    return text.TextBatches(ids, spans, pad=0, batch_size=2, description="counted")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens per channel below which texts are few, as in use; other tests have none (tests/conftest.py)."""
    monkeypatch.setattr("corp.steps.allocation.search.TOKENS_PER_CHANNEL", 32)


def rows(batches: text.TextBatches) -> list[list[int]]:
    return [row for batch in batches for row in batch["input_ids"].tolist()]


def test_given_and_own_texts_are_mixed_and_own_ones_begin_as_given_ones_do() -> None:
    model, texts = decoders.build("llama"), given()
    both = written.with_own_texts(model, texts, 12, seed=3)
    known = rows(texts)
    own = [row for row in rows(both) if row not in known]
    assert (both.samples, len(own)) == (18, 12)
    assert [row for row in rows(both) if row in known] == known
    assert all(len(row) == LENGTH for row in own)
    every = [row[i : i + written.PROMPT] for row in known for i in range(LENGTH)]
    assert all(row[: written.PROMPT] in every for row in own)
    # Of any three in a row, one was given: whatever is held out has both kinds.
    kinds = [row in known for row in rows(both)]
    assert all(any(kinds[i : i + 3]) for i in range(len(kinds) - 2))
    assert both.fingerprint() != texts.fingerprint()
    assert both.describe() == f"counted; 12 of {LENGTH} tokens written by the model, seed 3"


def test_the_seed_decides_and_other_random_numbers_are_left_alone() -> None:
    model, texts = decoders.build("llama"), [torch.arange(40)]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (written.own_texts(model, texts, 3, length=LENGTH, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_tokens_are_drawn_as_the_model_predicts_them_whatever_its_generation_config_says() -> None:
    model: Any = decoders.build("llama")
    model.generation_config.top_k, model.generation_config.temperature = 1, 0.01
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token is as likely as any other
    drawn = written.own_texts(model, [torch.arange(40)], 40, length=40)[:, written.PROMPT :]
    assert len(drawn.unique()) > 250  # of 320, in 1,280 draws


def test_given_texts_that_are_too_short_to_go_on_from_are_kept_but_not_continued() -> None:
    texts = given()
    short = text.TextBatches(texts.ids, [text.Span(0, 5, 1), *texts.spans[1:]], 0, 2, "counted")
    both = written.with_own_texts(decoders.build("llama"), short, 8)
    assert both.samples == 14
    assert sum(span.end - span.start == LENGTH for span in both.spans) == 13


def test_stand_ins_are_as_many_as_own_texts_would_be() -> None:
    texts = given()
    assert written.stand_ins(texts, 12).tokens == written.with_own_texts(decoders.build("llama"), texts, 12).tokens


def test_what_cannot_write_is_refused() -> None:
    with pytest.raises(ModelError, match="does not generate text"):
        written.own_texts(build("vit"), [torch.arange(40)], 2, length=20)
    with pytest.raises(DataError, match="continue 8 tokens"):
        written.with_own_texts(decoders.build("llama"), given(length=8), 2)


@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_the_command_calibrates_on_both(tmp_path: Path) -> None:
    opt, texts = hf_folders.opt(tmp_path / "opt"), hf_folders.texts(tmp_path / "texts.jsonl")
    options = ("--calib", texts, "--seq-len", 16, "--samples", 6, "--own-texts", 9)
    result = run("calibrate", f"hf:{opt}", *options, "-o", tmp_path / "stats")
    assert result.exit_code == 0, result.output
    stats = corp.Statistics.load(tmp_path / "stats")
    assert stats.samples == 15
    assert "9 of 16 tokens written by the model" in stats.origin["preprocessing"]
    made = content("prune", f"hf:{opt}", *options, "--mlp", 0.5, "--dry-run")
    assert "15 samples" in made["what"]
    bert = hf_folders.bert(tmp_path / "bert")
    options = ("--calib", texts, "--mlp", 0.5, "--own-texts", 4, "-o", tmp_path / "out")
    assert "does not generate text" in failure("prune", f"hf:{bert}", *options)
    assert "does not generate text" in failure("prune", f"hf:{bert}", *options, "--dry-run")


@pytest.mark.usefixtures("few")
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_few_texts_are_added_to_unasked_and_said_so(tmp_path: Path) -> None:
    opt, texts = hf_folders.opt(tmp_path / "opt"), hf_folders.texts(tmp_path / "texts.jsonl")
    width = corp.find_sites(hf_models.create(str(opt))).mlp[0].width
    lacking = math.ceil((40 * width - 6 * 16) / 16)
    assert lacking > 12

    def calibrated(*more: Any) -> tuple[str, int]:
        options = ("--calib", texts, "--seq-len", 16, "--samples", 6, "-o", tmp_path / f"stats{len(more)}{more[-1:]}")
        result = run("calibrate", f"hf:{opt}", *options, *more)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split()), corp.Statistics.load(options[-1]).samples

    said, samples = calibrated()
    assert f"96 tokens are {96 / width:.0f} per MLP channel" in said
    assert "the model writes 12 itself (--own-texts 0 turns that off)" in said
    assert f"or --own-texts {lacking}" in said
    assert samples == 18  # at most twice as many as were given
    said, samples = calibrated("--own-texts", 0)
    assert f"let the model write some: --own-texts {lacking}" in said
    assert samples == 6
    said, samples = calibrated("--own-texts", lacking)
    assert "per MLP channel" not in said
    assert samples == 6 + lacking


@pytest.mark.usefixtures("few")
@pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
def test_own_texts_are_written_for_mlps_that_are_fitted_and_by_models_that_can(tmp_path: Path) -> None:
    opt, texts = hf_folders.opt(tmp_path / "opt"), hf_folders.texts(tmp_path / "texts.jsonl")
    options = ("--calib", texts, "--seq-len", 16, "--samples", 6, "--dry-run")
    assert "18 samples" in content("prune", f"hf:{opt}", *options, "--mlp", 0.5)["what"]
    assert "6 samples" in content("prune", f"hf:{opt}", *options, "--attn", 0.5)["what"]
    bert = hf_folders.bert(tmp_path / "bert")
    assert "6 samples" in content("prune", f"hf:{bert}", *options, "--mlp", 0.5)["what"]
    analysed = content("analyze", f"hf:{opt}", *options[:-1])
    assert analysed["samples"] == 6
    streamed = failure("prune", f"hf:{opt}", *options[:-1], "--mlp", 0.5, "--own-texts", 3, "--stream", "-o", "new")
    assert "--stream holds one block" in streamed


def test_a_dry_run_counts_own_texts_without_writing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opt, texts = hf_folders.opt(tmp_path / "opt"), hf_folders.texts(tmp_path / "texts.jsonl")
    monkeypatch.setattr(written, "own_texts", lambda *_args, **_more: pytest.fail("texts were written"))
    options = ("--calib", texts, "--seq-len", 16, "--samples", 6, "--own-texts", 9, "--mlp", 0.5, "--dry-run")
    result = run("prune", f"hf:{opt}", *options)
    assert result.exit_code == 0, result.output
    assert "15 samples" in " ".join(result.output.split())
    assert "leaves out the writing of 9 texts" in " ".join(result.output.split())


def test_texts_that_end_early_are_reported(tmp_path: Path) -> None:
    opt, texts = hf_folders.opt(tmp_path / "opt"), hf_folders.texts(tmp_path / "texts.jsonl")
    options = ("--calib", texts, "--samples", 100_000, "--own-texts", 0, "-o", tmp_path / "stats")
    result = run("calibrate", f"hf:{opt}", *options)
    assert "not for 100000" in " ".join(result.output.split())
