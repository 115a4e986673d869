"""Pruning block by block from a folder: the folder that comes out is, to the byte, the one of the ordinary path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models import save_for_hf
from torch import nn

import corp
from corp import Recipe, Settings
from corp.adapters import hf_models, timm_models
from corp.adapters.shell import placeholder, without_weights
from corp.cli.console import in_flags
from corp.errors import DataError, ModelError, PlanError, StorageError
from corp.measure.estimate import Estimate, Stage
from corp.measure.footprint import weight_bytes
from corp.storage.folder import WEIGHTS
from corp.storage.streamed import prune as streamed
from corp.storage.streamed.presence import open_folder
from corp.storage.streamed.walk import Walk
from tests.helpers import hf_folders, models, rotary_models, small_timm
from tests.helpers.command import content, failure
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seed_all, seeded

HALF: dict[str, Any] = {"mlp": 0.5, "attn": 0.5, "vo": 0.5}
PAPER, REFIT = Recipe.paper(**HALF), Recipe.paper(**HALF, sequential=True)

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


def llama(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    rotary_models.build(family, dtype).save_pretrained(folder)
    return folder


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def ordinary(dense: nn.Module, data: list[Any], recipe: Recipe, out: Path) -> bytes:
    corp.save(corp.prune(dense, data, recipe), out)
    return weights(out)


@pytest.mark.parametrize("recipe", [PAPER, REFIT], ids=["paper", "refit"])
@pytest.mark.parametrize("family", by_kind(["llama", "llama-ungrouped-tied", "gpt-neox"], ["llama"]))
def test_a_decoder_comes_out_as_from_prune(tmp_path: Path, family: str, recipe: Recipe) -> None:
    dense, data = llama(tmp_path / "dense", family), rotary_models.batches()
    report = corp.prune_streamed(dense, data, recipe, tmp_path / "out")
    result = corp.prune(hf_models.create(str(dense)), data, recipe)
    corp.save(result, tmp_path / "whole")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert report.plan == result.plan
    assert report.params == result.report.params
    assert report.macs == result.report.macs
    loaded = corp.load(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in result.model.state_dict().items())


def test_a_checkpoint_in_bfloat16_stays_so(tmp_path: Path) -> None:
    dense, data = llama(tmp_path / "dense", dtype=torch.bfloat16), rotary_models.batches()
    corp.prune_streamed(dense, data, REFIT, tmp_path / "out")
    assert weights(tmp_path / "out") == ordinary(hf_models.create(str(dense)), data, REFIT, tmp_path / "whole")
    assert next(corp.load(tmp_path / "out").parameters()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", by_kind(["hf-vit", "hf-clip", "hf-gpt2"], ["hf-clip"]))
def test_models_saved_under_older_names_and_of_two_towers(tmp_path: Path, family: str) -> None:
    models.build(family).float().save_pretrained(tmp_path / "dense")  # type: ignore[operator]
    data = models.batches(family)
    report = corp.prune_streamed(tmp_path / "dense", data, REFIT, tmp_path / "out")
    result = corp.prune(hf_models.create(str(tmp_path / "dense")), data, REFIT)
    corp.save(result, tmp_path / "whole")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert report.plan == result.plan


def test_a_vit_of_timm_on_images_with_labels(tmp_path: Path) -> None:
    seed_all(0)
    size = small_timm.SIDE
    data = [(torch.randn(4, 3, size, size, generator=seeded(i)), torch.zeros(4)) for i in range(3)]
    with small_timm.in_place():
        save_for_hf(timm.create_model(small_timm.NAME), tmp_path / "dense", safe_serialization=True)
        corp.prune_streamed(tmp_path / "dense", data, REFIT, tmp_path / "out")
        dense = timm_models.from_folder(tmp_path / "dense")
        assert weights(tmp_path / "out") == ordinary(dense, data, REFIT, tmp_path / "whole")


def test_a_target_over_all_layers_takes_a_walk_of_its_own(tmp_path: Path) -> None:
    folder, data, recipe = llama(tmp_path / "dense"), rotary_models.batches(), Recipe(target_params=0.75)
    report = corp.prune_streamed(folder, data, recipe, tmp_path / "out")
    dense = hf_models.create(str(folder))
    stats = corp.calibrate(dense, data)
    applied = corp.apply(dense, stats, corp.plan(dense, stats, replace(recipe, sequential=False)))
    corp.save(corp.repair(dense, applied, data), tmp_path / "whole")
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert "no models were tried" in report.plan.notes[0]


class Killed(BaseException):
    """Not an error that anybody handles."""


def dying(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, which ends the run when it is called once more than `after` times."""
    calls: Iterator[int] = iter(range(after))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return call(*args, **kwargs)

    return wrapped


STAGES = [
    ("corp.storage.streamed.walk.Collector.watching", 1),
    ("corp.storage.streamed.walk.through", 6),  # on the way through the second block
    ("corp.storage.streamed.walk.plan_sites", 1),
    ("corp.storage.streamed.walk.narrowed_copy", 1),
    ("corp.storage.streamed.walk.Repair.correct_block", 1),
    ("corp.storage.streamed.streams.Store.finish", 1),
    ("corp.storage.streamed.streams.Store.forget", 1),  # when the second block's record is there already
    ("corp.storage.streamed.prune.pruned_shell", 0),
    ("corp.storage.streamed.prune.write_streamed", 0),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    dense = hf_models.create(str(llama(folder / "dense")))
    return ordinary(dense, rotary_models.batches(), REFIT, folder / "whole")


@pytest.mark.parametrize(("stage", "after"), STAGES, ids=[name.rpartition(".")[2] for name, _ in STAGES])
def test_a_killed_run_goes_on_at_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, after: int, undisturbed: bytes
) -> None:
    folder, data = llama(tmp_path / "dense"), rotary_models.batches()
    with monkeypatch.context() as patch:
        patch.setattr(stage, dying(resolve_name(stage), after))
        with pytest.raises(Killed):
            corp.prune_streamed(folder, data, REFIT, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    pruned: list[int] = []
    ordinary_prune = Walk._prune
    monkeypatch.setattr(Walk, "_prune", lambda self, n, block: (pruned.append(n), ordinary_prune(self, n, block)))
    corp.prune_streamed(folder, data, REFIT, tmp_path / "out")
    done = 2 if after == 0 or stage.endswith("forget") else 1
    assert pruned == list(range(done, 2))
    assert weights(tmp_path / "out") == undisturbed
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_unfinished_run_of_another_recipe_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = llama(tmp_path / "dense"), rotary_models.batches()
    with monkeypatch.context() as patch:
        patch.setattr(streamed, "write_streamed", dying(lambda: None, 0))
        with pytest.raises(Killed):
            corp.prune_streamed(folder, data, PAPER, tmp_path / "out")
    with pytest.raises(StorageError, match=r"unfinished run.*recipe"):
        corp.prune_streamed(folder, data, REFIT, tmp_path / "out")
    corp.prune_streamed(folder, data, REFIT, tmp_path / "out", settings=Settings(fresh=True))
    assert (tmp_path / "out").is_dir()


def test_no_more_than_one_block_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data, held = llama(tmp_path / "dense"), rotary_models.batches(), []
    ordinary_prune = Walk._prune

    def watched(self: Walk, number: int, block: Any) -> None:
        held.append((weight_bytes(self.model), weight_bytes(self.model.get_submodule(block.name))))
        ordinary_prune(self, number, block)

    monkeypatch.setattr(Walk, "_prune", watched)
    corp.prune_streamed(folder, data, PAPER, tmp_path / "out")
    dense = hf_models.create(str(folder))
    block = weight_bytes(dense.get_submodule("model.layers.0"))
    rest = weight_bytes(dense) - 2 * block
    placeholders = 4 * len(list(dense.parameters()))
    assert len(held) == 2
    for whole, own in held:
        assert own == block
        assert rest + block <= whole <= rest + block + placeholders


def test_the_need_is_announced_and_limited(tmp_path: Path) -> None:
    folder, data = llama(tmp_path / "dense"), rotary_models.batches()

    class Listener(corp.Observer):
        said: list[str] = []  # noqa: RUF012

        def note(self, message: str) -> None:
            self.said.append(message)

    corp.prune_streamed(folder, data, PAPER, tmp_path / "out", observer=Listener())
    assert "of memory in addition to the program" in Listener.said[0]
    with pytest.raises(PlanError, match=r"1\.0KB are allowed"):
        corp.prune_streamed(folder, data, PAPER, tmp_path / "other", settings=Settings(memory=1024))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_agreement": 0.9}, "min_agreement tries whole models"),
        ({"target_latency": 0.9}, "target_latency times whole models"),
        ({**HALF, "output": 0.5}, "output factors the output head"),
        ({**HALF, "rotary": "shared"}, "rotary='shared' looks at all layers"),
        ({"tokens": (1, 1)}, "tokens is fitted on the whole model"),
    ],
)
def test_what_needs_the_whole_model_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        corp.prune_streamed(llama(tmp_path / "dense"), rotary_models.batches(), Recipe(**changes), tmp_path / "out")


def test_other_bad_input_is_refused(tmp_path: Path) -> None:
    folder, data = llama(tmp_path / "dense"), rotary_models.batches()
    with pytest.raises(DataError, match="not an iterator"):
        corp.prune_streamed(folder, iter(data), PAPER, tmp_path / "out")
    with pytest.raises(DataError, match="was empty"):
        corp.prune_streamed(folder, [], PAPER, tmp_path / "out")
    with pytest.raises(ModelError, match=r"not a folder with a config\.json"):
        corp.prune_streamed(tmp_path / "missing", data, PAPER, tmp_path / "out")
    with pytest.raises(ModelError, match="cannot be pruned block by block: the output of"):
        corp.prune_streamed(llama(tmp_path / "gemma2", "gemma2"), data, PAPER, tmp_path / "out")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=64, **sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    translation = [{"input_ids": batch["input_ids"], "decoder_input_ids": batch["input_ids"]} for batch in data]
    with pytest.raises(ModelError, match=r"block by block: decoder\.block\.0\.layer\.0 takes something"):
        corp.prune_streamed(tmp_path / "t5", translation, PAPER, tmp_path / "out")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError, match="no weights as safetensors"):
        corp.prune_streamed(folder, data, PAPER, tmp_path / "out")


def test_a_shell_takes_no_memory_and_shows_what_is_missing(tmp_path: Path) -> None:
    opened = open_folder(llama(tmp_path / "dense", "llama-ungrouped-tied"))
    assert opened.model.lm_head.weight is opened.model.model.embed_tokens.weight
    assert weight_bytes(opened.model) < 4 * sum(1 for _ in opened.model.modules()) + 200
    assert all(parameter.isnan().all() for parameter in opened.model.parameters())
    with without_weights():
        layer = nn.Linear(2, 3)
    assert layer.weight.is_meta
    assert not nn.Linear(2, 3).weight.is_meta
    assert placeholder(layer.weight, torch.bfloat16).untyped_storage().nbytes() == 2


def test_the_estimate_says_when_this_is_the_way() -> None:
    made = Estimate("pruning", (Stage("calibrating", 1.0, 3 * 2**30),), base=2**30, free=2 * 2**30)
    assert made.advice() == ["that is more than the available 3.0GB; corp.prune_streamed holds one block at a time"]
    assert in_flags(made.advice()[0]).endswith("--stream holds one block at a time")
    assert replace(made, free=3 * 2**30).advice() == []


def test_the_command_streams(tmp_path: Path) -> None:
    folder, out = hf_folders.opt(tmp_path / "opt"), tmp_path / "small"
    (tmp_path / "texts.txt").write_text("the cat sat on the mat . then it ran under a big tree .\n" * 40)
    given = ["prune", f"hf:{folder}", "--calib", tmp_path / "texts.txt", "--preset", "paper", "--mlp", 0.5]
    given += ["--seq-len", 8, "--batch-size", 4, "--stream"]
    assert content(*given, "--dry-run", "--json")["memory"] > 0
    report = content(*given, "-o", out, "--json")
    assert report["params"]["after"] < report["params"]["before"]
    assert (out / "tokenizer.json").is_file()
    assert corp.load(out).config.ffn_dim == 32
    assert "cannot be combined with --eval-data" in failure(
        *given, "-o", tmp_path / "b", "--eval-data", tmp_path / "texts.txt"
    )
