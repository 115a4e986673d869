"""The refit in sequence, on tiny random models of several families: two streams, block by block."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import corp
from corp import Recipe
from corp.calibration.batches import without_cache
from corp.errors import CorpWarning, DataError, ModelError, PlanError, RecipeError
from corp.numerics.affine import Folded
from corp.sites import fingerprint, projection_of
from corp.surgery.linear import refill
from corp.surgery.refit.blocks import examine, stream_scales
from corp.surgery.refit.layer import correction
from corp.surgery.refit.recording import samples_wanted
from corp.surgery.refit.replay import Block, blocks_of, close, drive, stream_of
from tests.helpers import hf_folders, models, rotary_models
from tests.helpers.command import content, failure
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seed_all, seeded

HALF: dict[str, Any] = {"mlp": 0.5, "attn": 0.5, "vo": 0.5, "rank": "exact"}
ROTARY = ("llama", "llama-biased", "qwen2", "phi", "gpt-neox")  # the last two run attention and MLP side by side
OTHERS = ("vit", "deit3-layerscale", "no-biases", "swiglu-packed", "hf-opt", "hf-gpt2-cross", "hf-dinov2", "hf-clip",
          "torch-encoder-sequence-first", "open-clip-tower", "hf-bert", "hf-distilbert", "torch-encoder",
          "torchvision-vit", "hf-whisper")  # fmt: skip  # the last one's decoder takes the encoder's output
REFITTED = ("vit", "swiglu-packed", "hf-gpt2-cross", "hf-whisper", "llama")

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")


def setup(family: str) -> tuple[nn.Module, list[Any]]:
    if family in ROTARY:
        return rotary_models.build(family), rotary_models.batches()
    return models.build(family), models.batches(family)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def block_outputs(model: nn.Module, data: list[Any]) -> dict[str, list[Tensor]]:
    """What every block gives when the whole model runs."""
    found: dict[str, list[Tensor]] = {}
    names = blocks_of(list(corp.find_sites(model)))
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _args, output, name=name: found.setdefault(name, []).append(stream_of(output))
        )
        for name in names
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with without_cache(model):
        for batch in data:
            models.run(model, batch)
    torch.backends.mha.set_fastpath_enabled(fast)
    for handle in handles:
        handle.remove()
    return found


def error(model: nn.Module, dense: nn.Module, data: list[Any]) -> float:
    """Of the last block's output at real tokens, relative."""
    found, expected = (list(block_outputs(one, data).values())[-1] for one in (model, dense))
    lost = whole = 0.0
    for batch, a, b in zip(data, found, expected, strict=True):
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        real = torch.ones(a.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        lost, whole = lost + float((a - b)[real].square().sum()), whole + float(b[real].square().sum())
    return lost / whole


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], list[tuple[Tensor, Tensor]]]:
    """Every hidden state with which sequential fitting drove a block, and what came out, by model and block."""
    streams: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}

    def spy(model: nn.Module, name: str, call: Any, hidden: Tensor) -> Tensor:
        output = drive(model, name, call, hidden)
        streams.setdefault((id(model), name), []).append((hidden, output))
        return output

    monkeypatch.setattr("corp.surgery.refit.repair.drive", spy)
    return streams


@pytest.mark.parametrize("family", by_kind([*OTHERS, *ROTARY], REFITTED))
def test_the_streams_are_those_of_the_whole_models(
    family: str, driven: dict[tuple[int, str], list[tuple[Tensor, Tensor]]]
) -> None:
    model, data = setup(family)
    result = models.prune(model, data, Recipe.paper(**HALF, sequential=True))
    for whole in (model, result.model):
        outputs = block_outputs(whole, data)
        for name, after in pairwise(outputs):
            if not after.endswith(".0"):  # of another chain
                streams = driven[id(whole), after][-len(data) :]  # the last time that the block was driven
                for (stream, _), output in zip(streams, outputs[name], strict=True):
                    torch.testing.assert_close(stream, output)


@pytest.mark.parametrize("family", by_kind([*OTHERS, *ROTARY], REFITTED))
def test_the_refit_leaves_no_larger_error(family: str) -> None:
    model, data = setup(family)
    before, modes, attached = fingerprint(model), [m.training for m in model.modules()], hooks(model)
    one_shot, result = (models.prune(model, data, Recipe.paper(**HALF, sequential=mode)) for mode in (False, True))
    before_refit, after = (error(one.model, model, data) for one in (one_shot, result))
    assert after < before_refit or (after == before_refit and not result.plan.why["refit"]["layers"])
    assert [(s.name, s.keep) for s in result.plan.sites] == [(s.name, s.keep) for s in one_shot.plan.sites]
    assert result.report.params == one_shot.report.params
    assert (fingerprint(model), [m.training for m in model.modules()], hooks(model)) == (before, modes, attached)
    assert hooks(result.model) == attached
    assert all(not m.training for m in result.model.modules())


@pytest.mark.parametrize("family", ["vit", "deit3-layerscale", "hf-dinov2", "hf-opt", "open-clip-tower"])
def test_the_gap_is_what_the_stream_lags_by(
    family: str, driven: dict[tuple[int, str], list[tuple[Tensor, Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the last layer of a block, before that is fitted: the difference of the block's outputs."""
    gaps: list[float] = []

    def spy(fit: Any, held: Any, *options: Any) -> Any:
        gaps.append(fit.square + held.square)
        return correction(fit, held, *options)

    monkeypatch.setattr("corp.surgery.refit.layer.correction", spy)
    model, data = setup(family)
    result = models.prune(model, data, Recipe.paper(**HALF, sequential=True))
    for number, name in enumerate(block_outputs(model, data)):
        dense = driven[id(model), name]
        before = driven[id(result.model), name][-len(data) :]  # of the MLP's fit, the last to run
        lag = sum(float((a - b).square().sum()) for (_, a), (_, b) in zip(dense, before, strict=True))
        assert gaps[2 * number + 1] == pytest.approx(lag)  # an attention and an MLP in every block


def test_what_is_read_counts_as_much_as_all_else() -> None:
    """So less is lost at the class token of a model that reads it than of one that reads all tokens."""
    model, data = models.build("vit"), models.batches("vit")
    spread = reading_all(model)
    reads, spreads = (models.prune(one, data, Recipe.paper(**HALF, sequential=True)) for one in (model, spread))
    assert reads.plan.why["refit"]["read"] == {"blocks.1": 1}
    assert spreads.plan.why["refit"]["read"] == {"blocks.1": 17}
    assert class_token_error(reads.model, model, data) < class_token_error(spreads.model, model, data)


@pytest.mark.parametrize(
    ("family", "junctions"),
    [
        ("hf-bert", ("attention.output.LayerNorm", "output.LayerNorm")),
        ("hf-distilbert", ("sa_layer_norm", "output_layer_norm")),
        ("torch-encoder", ("norm1", "norm2")),
        ("hf-opt", ()),
    ],
)
def test_post_norm_blocks_have_junctions(family: str, junctions: tuple[str, ...]) -> None:
    model, data = setup(family)
    with without_cache(model):
        blocks = examine(model, list(corp.find_sites(model)), lambda: models.run(model, data[0]))
    assert [block.junctions for block in blocks] == [tuple(f"{b.name}.{j}" for j in junctions) for b in blocks]


def reading_all(model: nn.Module) -> nn.Module:
    """The same, with the mean of all tokens in place of the class token."""
    spread: Any = copy.deepcopy(model)
    spread.global_pool = "avg"
    return spread


def class_token_error(pruned: nn.Module, dense: nn.Module, data: list[Any]) -> float:
    found, expected = (list(block_outputs(one, data).values())[-1] for one in (pruned, dense))
    return sum(float((a - b)[:, 0].square().sum()) for a, b in zip(found, expected, strict=True))


def test_auto_gives_way_where_it_cannot_be_had() -> None:
    assert Recipe(target_macs=0.7).refits
    assert not Recipe(target_macs=0.7, compensate="none").refits
    recipe = Recipe.paper(**HALF, sequential="auto")
    for family, taken in (("vit", True), ("post-norm", False)):
        result = models.prune(*setup(family), recipe)
        assert result.plan.recipe == recipe
        assert ("refit" in result.plan.why) is taken
        assert (result.plan.notes == []) is taken
    model, data = setup("vit")
    stats = corp.calibrate(model, data, forward=models.call)
    assert corp.apply(model, stats, corp.plan(model, stats, recipe)).report.params == result_params(model, data)


def result_params(model: nn.Module, data: list[Any]) -> tuple[int, int]:
    params: tuple[int, int] = models.prune(model, data, Recipe.paper(**HALF)).report.params
    return params


@pytest.mark.parametrize("family", ["vit", "llama"])
def test_a_result_can_be_repaired_later(family: str) -> None:
    model, data = setup(family)
    at_once, whole = (models.prune(model, data, Recipe.paper(**HALF, sequential=mode)) for mode in (False, True))
    before = fingerprint(at_once.model)
    repaired = corp.repair(model, at_once, data, forward=models.call)
    assert fingerprint(repaired.model) == fingerprint(whole.model)
    assert fingerprint(at_once.model) == before
    assert repaired.plan == whole.plan


@pytest.mark.parametrize("family", ["vit", "deit3-layerscale", "hf-opt", "llama"])
def test_where_nothing_is_removed_nothing_changes(family: str) -> None:
    model, data = setup(family)
    result = models.prune(model, data, Recipe.paper(sequential=True))
    assert result.plan.sites == ()
    assert fingerprint(result.model) == fingerprint(model)


def test_one_batch_is_enough_if_it_has_samples_to_hold_out() -> None:
    model, data = models.build("vit"), models.batches("vit", 1)
    plain, refitted = (
        models.prune(model, data, Recipe.paper(**HALF, sequential=sequential)) for sequential in (False, True)
    )
    assert error(refitted.model, model, data) < error(plain.model, model, data)


def test_post_norm_blocks_are_refitted_at_their_junctions() -> None:
    model, data = setup("hf-bert")
    plain, refitted = (
        models.prune(model, data, Recipe.paper(**HALF, sequential=sequential)) for sequential in (False, True)
    )
    assert error(refitted.model, model, data) < error(plain.model, model, data)


def test_the_same_data_give_the_same_bits() -> None:
    model, data = models.build("vit", torch.float32), models.batches("vit", dtype=torch.float32)
    first, second = (models.prune(model, data, Recipe.paper(**HALF, sequential=True)) for _ in range(2))
    assert fingerprint(first.model) == fingerprint(second.model)
    assert first.plan == second.plan


def test_layers_that_keep_their_width_make_up_for_others() -> None:
    model, data = reading_all(models.build("vit")), models.batches("vit")
    recipe = {"mlp": 0.5, "overrides": {"blocks.1.*": {"mlp": 0.0}}}
    one_shot, result = (models.prune(model, data, Recipe.paper(**recipe, sequential=mode)) for mode in (False, True))
    assert error(result.model, model, data) < 0.95 * error(one_shot.model, model, data)
    skipping = models.prune(model, data, Recipe.paper(mlp=0.5, skip=["blocks.1.*"], sequential=True)).model
    for name, parameter in skipping.named_parameters():
        if name.startswith("blocks.1."):
            torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=0)


def test_padding_is_not_data() -> None:
    model = models.build("hf-opt")
    generator = seeded(5)
    ids = torch.randint(3, 50, (12, 9), generator=generator)
    real = torch.ones_like(ids)
    plain = {"input_ids": ids, "attention_mask": real}
    padding = torch.randint(3, 50, (12, 4), generator=generator)
    padded = {"input_ids": torch.cat([ids, padding], 1), "attention_mask": torch.cat([real, 0 * padding], 1)}
    recipe = Recipe.paper(mlp=0.5, attn=0.5, sequential=True)
    first, second = (models.prune(model, [batch], recipe).model for batch in (plain, padded))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("post-norm", "the output of blocks.0 is not its input plus"),
        ("parallel-things", "the output of blocks.0.attns.0 is not its input plus"),
        ("siglip", "attn_pool.proj is not in a block"),
    ],
)
def test_models_of_another_make_are_refused_before_calibration(
    family: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corp.steps.widths.run_calibration", lambda *_args, **_options: pytest.fail("calibrated first"))
    model, data = setup(family)
    with pytest.raises(PlanError, match=f"sequential=True: this model cannot be refitted: .*{reason}"):
        models.prune(model, data, Recipe.paper(**HALF, sequential=True))
    assert hooks(model) == 0


class Between(nn.Module):
    """A model that does something to the stream between its blocks."""

    def __init__(self, inner: Any, between: Any) -> None:
        super().__init__()
        self.inner, self.between = inner, between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner.blocks:
            x = self.between(block(x))
        return x


def between(change: Any) -> tuple[nn.Module, list[Any], Tensor]:
    model = Between(models.build("vit"), change)
    return model, [_moved(site) for site in corp.find_sites(model.inner)], torch.randn(4, 17, 24, dtype=torch.float64)


def test_what_changes_a_stream_in_place_between_blocks_is_noticed() -> None:
    model, sites, x = between(lambda x: x.mul_(2))
    with pytest.raises(PlanError, match="calling its blocks one by one"):
        examine(model, sites, lambda: model(x))


def test_a_stream_that_is_computed_from_another_starts_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sites, x = between(lambda x: x * 2)
    assert [(block.starts, block.fed) for block in examine(model, sites, lambda: model(x))] == [
        (True, False),
        *[(True, True)] * (len(model.inner.blocks) - 1),
    ]
    plain, sites, x = between(lambda x: x)
    assert [(block.starts, block.fed) for block in examine(plain, sites, lambda: plain(x))] == [
        (True, False),
        *[(False, False)] * (len(plain.inner.blocks) - 1),
    ]
    monkeypatch.setattr("corp.surgery.refit.blocks.MOST_FED", 0)
    with pytest.raises(PlanError, match=r"such as inner\.blocks\.1, are computed from an earlier block's output"):
        examine(model, sites, lambda: model(x))


def images_and_text() -> tuple[nn.Module, list[Any]]:
    """A LLaVA: its language model takes what its vision tower makes of an image in place of some tokens."""
    seed_all(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    text = transformers.LlamaConfig(**sizes, vocab_size=50)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=49)
    ids = torch.randint(3, 40, (12, 4, 14))
    ids[..., 1:5] = config.image_token_id
    model = transformers.LlavaForConditionalGeneration(config).double().eval()
    return model, [{"input_ids": some, "pixel_values": torch.randn(4, 3, 16, 16)} for some in ids]


def translator(kind: str) -> tuple[nn.Module, list[Any]]:
    """An encoder-decoder: BART's decoder takes the output of the encoder's last block as it is, T5's behind a norm."""
    seed_all(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    if kind == "Bart":
        sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _BART.items()} | {"d_model": 16}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(vocab_size=50, **sizes))
    ids = torch.randint(3, 50, (12, 8, 12))
    return model.double().eval(), [{"input_ids": some, "decoder_input_ids": some[:, :9] + 0} for some in ids]


_BART = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}


@torch.no_grad()
@pytest.mark.parametrize(
    ("setup", "first"),
    [(images_and_text, "model.language_model.layers.0"), (partial(translator, "Bart"), "decoder.layers.0"),
     (partial(translator, "T5"), "decoder.block.0.layer.0")],
)  # fmt: skip
def test_a_chain_is_refitted_to_what_the_pruned_one_before_it_makes(
    setup: Any, first: str, driven: dict[tuple[int, str], list[tuple[Tensor, Tensor]]]
) -> None:
    model, data = setup()
    recipe = Recipe(mlp=0.5, attn=0.5, vo=0.5)
    one_shot, result = (corp.prune(model, data, dataclasses.replace(recipe, sequential=mode)) for mode in (False, True))
    starts: list[Tensor] = []
    handle = result.model.get_submodule(first).register_forward_pre_hook(lambda _m, args: starts.append(args[0]))
    outputs = [result.model(**batch)[0] for batch in data]
    handle.remove()
    for (stream, _), start in zip(driven[id(result.model), first][-len(data) :], starts, strict=True):
        torch.testing.assert_close(stream, start)
    dense = [model(**batch)[0] for batch in data]
    before = [one_shot.model(**batch)[0] for batch in data]
    assert _distance(outputs, dense) < _distance(before, dense)


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    return sum(float((a - b).square().sum()) for a, b in zip(found, expected, strict=True))


def _moved(site: Any) -> Any:
    """The same site in the model around."""
    names = {name: f"inner.{getattr(site, name)}" for name in ("name", "down") if hasattr(site, name)}
    if hasattr(site, "v"):
        names["attention"] = f"inner.{site.attention}"
    return dataclasses.replace(site, **names)


def test_a_cache_is_refused() -> None:
    model, data = models.build("hf-opt"), models.batches("hf-opt")
    with pytest.raises(PlanError, match="takes a DynamicCache, which every call may change"):
        corp.prune(model, data, Recipe.paper(mlp=0.5, sequential=True), forward=lambda m, b: m(**b, use_cache=True))


def test_statistics_alone_do_not_do() -> None:
    model, data = models.build("vit"), models.batches("vit")
    stats = corp.calibrate(model, data, forward=models.call)
    with pytest.raises(PlanError, match=r"needs the data.*corp\.prune"):
        corp.plan(model, stats, Recipe.paper(mlp=0.5, sequential=True))
    plan = models.prune(model, data, Recipe.paper(mlp=0.5, sequential=True)).plan
    with pytest.raises(PlanError, match=r"needs the data.*corp\.prune"):
        corp.apply(model, stats, plan)


@pytest.mark.parametrize("later", [False, True])
def test_a_weight_that_changes_after_its_refit_is_found(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One per mille off in a layer that the streams have passed: the model is not given out."""
    model, data = setup("vit")
    one_shot = models.prune(model, data, Recipe.paper(**HALF))
    repaired = partial(corp.repair, model, one_shot, data, forward=models.call)
    tampered: list[str] = []

    def tampering(smaller: Any, name: str, folded: Folded, *, bias: bool) -> None:
        refill(smaller, name, folded, bias=bias)
        if name == "blocks.1.attn.proj":
            smaller.blocks[0].mlp.fc2.weight.data *= 1.001
            tampered.append(name)

    monkeypatch.setattr("corp.surgery.refit.layer.refill", tampering)
    with pytest.raises(ModelError, match=r"self-check: the refitted model does not reproduce its refit \(blocks\.1\)"):
        repaired() if later else models.prune(model, data, Recipe.paper(**HALF, sequential=True))
    assert tampered == ["blocks.1.attn.proj"]
    assert hooks(model) == 0


def test_an_iterator_is_refused() -> None:
    def once() -> Iterator[Any]:
        yield from models.batches("vit")

    with pytest.raises(DataError, match="reads the data twice"):
        corp.prune(models.build("vit"), once(), Recipe.paper(mlp=0.5, sequential=True))
    with pytest.raises(DataError, match="empty"):
        corp.prune(models.build("vit"), [], Recipe.paper(mlp=0.5, sequential=True))


def test_memory_is_counted_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corp.surgery.refit.recording.free_bytes", lambda _device: 1000)
    recipe = Recipe.paper(mlp=0.5, sequential=True, sequential_samples=40)
    with pytest.raises(PlanError, match=r"hidden states of the refit need .*MB, 1000B are free.*fewer samples"):
        models.prune(models.build("vit"), models.batches("vit"), recipe)


def test_where_memory_is_short_the_refit_takes_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = models.build("vit"), models.batches("vit", count=6, size=20)
    whole = models.prune(model, data, Recipe.paper(mlp=0.5, sequential=True)).plan.why["refit"]["samples"]
    monkeypatch.setattr("corp.surgery.refit.recording.free_bytes", lambda _device: 1000)
    short = models.prune(model, data, Recipe.paper(mlp=0.5, sequential=True)).plan.why["refit"]["samples"]
    assert (whole, short) == (120, 20)  # one batch has to do


def block_of(tokens: int, inputs: int, read: int) -> Block:
    site: Any = SimpleNamespace(inputs=inputs)
    return Block("blocks.0", True, (site,), (), tokens, True, read=read)


def test_the_refit_takes_as_many_samples_as_have_enough_tokens() -> None:
    recipe = Recipe(mlp=0.5)
    assert samples_wanted(recipe, [block_of(16, 64, 16)]) == 49_152 // 16  # short texts: many of them
    assert samples_wanted(recipe, [block_of(16, 2048, 16)]) == 32 * 2048 // 16  # a wide layer needs more
    assert samples_wanted(recipe, [block_of(197, 768, 1)]) == 512  # of each image one token is read
    assert samples_wanted(recipe, [block_of(4096, 768, 1)]) == 3 * 12  # of large ones three times the tokens have to do
    assert samples_wanted(Recipe(mlp=0.5, sequential_samples=7), [block_of(197, 768, 1)]) == 7


def test_samples_are_spread_over_the_data(driven: dict[tuple[int, str], list[tuple[Tensor, Tensor]]]) -> None:
    model, data = models.build("vit"), models.batches("vit", count=6, size=20)
    models.prune(model, data, Recipe.paper(mlp=0.5, sequential=True, sequential_samples=40))
    outputs = block_outputs(model, data)["blocks.0"]
    found = driven[id(model), "blocks.0"]
    assert len(found) == 2
    for (_, stream), number in zip(found, (0, 3), strict=True):
        torch.testing.assert_close(stream, outputs[number])


@pytest.mark.filterwarnings("default::corp.errors.CorpWarning")
def test_few_tokens_are_told() -> None:
    model, data = models.build("vit"), models.batches("vit", count=6, size=10)
    with pytest.warns(CorpWarning, match="blocks.0.mlp .*fewer tokens than twice its inputs"):
        models.prune(model, data, Recipe.paper(mlp=0.1, sequential=True, sequential_samples=10))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"sequential": 1}, "not one of"),
        ({"sequential": True, "compensate": "none"}, "compensate='none'"),
        ({"sequential": True, "sequential_samples": 0}, "whole number"),
        ({"sequential_samples": 9}, "used by the refit only"),
    ],
)
def test_recipes_that_make_no_sense(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.paper(mlp=0.5, **fields)


def test_saved_models_load(tmp_path: Path) -> None:
    seed_all(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=3).eval()
    data = [torch.randn(8, 3, 32, 32) for _ in range(2)]
    result = corp.prune(model, data, Recipe.paper(**{**HALF, "rank": "combined"}, sequential=True))
    corp.save(result, tmp_path / "out")
    loaded = corp.load(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(loaded(data[0]), result.model(data[0]))


def test_layer_scales_are_found() -> None:
    generator = seeded(0)
    x, a, b = (torch.randn(5, 7, 4, generator=generator) for _ in range(3))
    scale = torch.tensor([0.5, 1e-3, 0.0, -2.0])
    ones = stream_scales(x, x + a + b, [a, b])
    assert ones is not None
    assert all(bool((one == 1).all()) for one in ones)
    found = stream_scales(x, x + scale * a + b, [a, b])
    assert found is not None
    torch.testing.assert_close(found[0].float(), scale, rtol=1e-4, atol=1e-6)
    assert stream_scales(x, torch.nn.functional.layer_norm(x + a + b, (4,)), [a, b]) is None
    assert stream_scales(x, 0.999 * x + a + b, [a, b]) is None
    assert stream_scales(x, x, []) == []


def test_refilled_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(3, 2))
    folded = Folded(torch.arange(6.0, dtype=torch.float64).view(2, 3), torch.ones(2, dtype=torch.float64))
    for name, bias in (("0", False), ("1", True), ("0", True)):
        refill(model, name, folded, bias=bias)
        weight, found = projection_of(model.get_submodule(name))
        torch.testing.assert_close(weight, folded.W.float())
        assert (found is None) == (not bias)


def test_command(tmp_path: Path) -> None:
    texts = hf_folders.texts(tmp_path / "texts.jsonl")
    opt = hf_folders.opt(tmp_path / "opt")
    common = ("--mlp", 0.5, "--attn", 0.5, "--device", "cpu")
    fitted = ("--sequential", "--sequential-samples", 20)
    done = content("prune", f"hf:{opt}", "--calib", texts, "-o", tmp_path / "out", *common, *fitted)
    assert done["recipe"]["sequential_samples"] == 20
    plain = content("prune", f"hf:{opt}", "--calib", texts, "-o", tmp_path / "one-shot", *common, "--no-sequential")
    assert done["params"] == plain["params"]
    first, second = (corp.load(tmp_path / name) for name in ("out", "one-shot"))
    assert fingerprint(first) != fingerprint(second)
    said = failure("prune", f"hf:{opt}", "--stats", tmp_path, "-o", tmp_path / "no", *common, *fitted)
    assert "give --calib instead of --stats" in said
    assert not (tmp_path / "no").exists()


def test_a_giant_token_does_not_drown_the_others() -> None:
    """The first token of a text may be a thousand times as large as the others; the next norm divides by that."""
    model, data = rotary_models.build("llama"), rotary_models.batches(padded=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[1] *= 3000
    for batch in data:
        batch["input_ids"][:, 0] = 1
    one_shot, result = (models.prune(model, data, Recipe.paper(**HALF, sequential=mode)) for mode in (False, True))
    lost = []
    for made in (one_shot, result):
        pairs = zip(*(list(block_outputs(one, data).values())[-1] for one in (made.model, model)), strict=True)
        lost.append(sum(float((a - b)[:, 1:].square().sum()) / float(b[:, 1:].square().sum()) for a, b in pairs))
    assert lost[1] < 0.9 * lost[0]


def test_rounding_in_half_precision_grows_with_the_blocks_it_passes() -> None:
    noise, stream = (torch.randn(64, 32, generator=seeded(i)) for i in (1, 2))
    streams = stream.bfloat16(), (stream + 0.015 * noise).bfloat16()
    assert not close(*streams)
    assert close(*streams, blocks=6)
    assert not close(stream, stream + 1e-3 * noise, blocks=6)


class Wrapped(nn.Module):
    """A language model inside a module of the user's own, which has no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = rotary_models.build("llama")

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def test_a_language_model_inside_another_is_refitted_and_keeps_its_cache() -> None:
    model, data = Wrapped().eval(), rotary_models.batches()
    assert model.inner.config.use_cache
    result = corp.prune(model, data, Recipe(**HALF, sequential=True))
    for one in (model, result.model):
        assert one(**data[0]).past_key_values is not None
