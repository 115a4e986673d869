"""Merged tokens are what brute force says, equal tokens merge without loss, and nothing else changes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from corp import Recipe, find_sites
from corp.errors import ModelError, PlanError
from corp.measure.cost import count_macs
from corp.planning.merging import Merging
from corp.storage.export.formats import write_format
from corp.surgery.merged import merge_tokens
from corp.surgery.merging import match, merge, regroup, rows
from corp.surgery.merging_block import block_macs
from tests.helpers import models
from tests.helpers.kinds import by_kind
from tests.helpers.seeds import seeded

pytestmark = pytest.mark.filterwarnings("ignore::corp.errors.CorpWarning")
# Where the blocks are, and how many tokens come before the patches.
PLACES = {
    "vit": ("blocks", 1),
    "deit-distilled": ("blocks", 2),
    "deit3-layerscale": ("blocks", 1),
    "dinov2-registers": ("blocks", 5),
    "swiglu": ("blocks", 1),
    "scale-attn-norm": ("blocks", 1),
    "no-class-token": ("blocks", 0),
    "hf-vit": ("vit.layers", 1),
    "hf-deit": ("layers", 2),
    "hf-dinov2": ("encoder.layer", 1),
    "hf-clip": ("vision_model.encoder.layers", 1),
}
EVERYTHING = Recipe(mlp=0.5, attn=0.5, vo=0.5)


def merged(model: nn.Module, schedule: tuple[int, ...], family: str = "vit", **more: Any) -> nn.Module:
    path, prefix = PLACES[family]
    made = copy.deepcopy(model)
    merge_tokens(made, Merging(path, schedule, prefix, **more))
    return made


def pruned(family: str) -> nn.Module:
    return models.prune(models.build(family), models.batches(family), EVERYTHING).model


def by_brute_force(x: Tensor, sizes: Tensor, keys: Tensor, r: int, prefix: int) -> tuple[Tensor, Tensor, list[int]]:
    """One sample, token by token: tokens, sizes and where each token went."""
    n = len(x)
    first, second = range(prefix, n, 2), range(prefix + 1, n, 2)

    def cosine(i: int, j: int) -> float:
        return float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm())

    partner = {i: max(second, key=lambda j: cosine(i, j)) for i in first}
    sources = sorted(first, key=lambda i: -cosine(i, partner[i]))[:r]
    order = [*range(prefix), *(i for i in first if i not in sources), *second]
    members = [[i, *(s for s in sources if partner[s] == i)] for i in order]
    weight = [sizes[m].sum() for m in members]
    tokens = [(sizes[m][:, None] * x[m]).sum(0) / w for m, w in zip(members, weight, strict=True)]
    return (
        torch.stack(tokens),
        torch.stack(weight),
        [next(g for g, m in enumerate(members) if i in m) for i in range(n)],
    )


@pytest.mark.parametrize(("n", "prefix", "r"), [(12, 1, 3), (11, 1, 5), (9, 0, 1), (14, 3, 5), (8, 2, 0)])
def test_merging_equals_brute_force(n: int, prefix: int, r: int) -> None:
    draw = seeded(n)
    x, keys = (torch.randn(4, n, 6, generator=draw, dtype=torch.float64) for _ in range(2))
    sizes = torch.randint(1, 5, (4, n), generator=draw).double()
    found = match(keys, r, prefix)
    tokens, grown = merge(x, sizes, found, prefix)
    groups = regroup(torch.arange(n).expand(4, n), found, prefix)
    for b in range(4):
        expected = by_brute_force(x[b], sizes[b], keys[b], r, prefix)
        torch.testing.assert_close(tokens[b], expected[0])
        torch.testing.assert_close(grown[b], expected[1])
        assert groups[b].tolist() == expected[2]
    torch.testing.assert_close(grown.sum(1), sizes.sum(1))


def test_gradients_pass_a_merge() -> None:
    draw = seeded(0)
    x = torch.randn(2, 9, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    found = match(x.detach(), 3, 1)
    assert torch.autograd.gradcheck(lambda x: merge(x, x.new_ones(2, 9), found, 1)[0], (x,))


def pairs_of_equals(prefix: int, width: int) -> Tensor:
    """Two samples of prefix tokens and five pairs of equal neighbours."""
    x = torch.randn(2, prefix + 5, width, generator=seeded(3), dtype=torch.float64)
    return torch.cat([x[:, :prefix], x[:, prefix:].repeat_interleave(2, 1)], 1)


@pytest.mark.parametrize("narrow", [False, True], ids=["dense", "narrowed"])
@pytest.mark.parametrize("family", PLACES)
def test_equal_tokens_merge_without_loss(family: str, narrow: bool) -> None:
    """The dense blocks are the oracle: log(size) has to stand for the tokens that went."""
    if narrow and family not in ("vit", "hf-vit", "dinov2-registers"):
        pytest.skip("one family of each kind is enough")
    model = pruned(family) if narrow else models.build(family)
    path, prefix = PLACES[family]
    x = pairs_of_equals(prefix, 24)
    expected = x
    with torch.no_grad():
        for block in model.get_submodule(path).children():
            expected = block(expected, None)
            expected = expected[0] if isinstance(expected, tuple) else expected
        found = merged(model, (5, 0), family, unmerge=True).get_submodule(path)(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", ["vit", "deit-distilled", "hf-vit"])
def test_a_last_block_that_computes_what_is_read_is_exact(family: str) -> None:
    model, batch = pruned(family), models.batches(family)[0]
    lighter = merged(model, (0, 0), family, read=PLACES[family][1])
    torch.testing.assert_close(models.run(lighter, batch), models.run(model, batch), rtol=1e-9, atol=1e-9)
    one = batch[:1] if isinstance(batch, Tensor) else {key: value[:1] for key, value in batch.items()}
    assert count_macs(lighter, one) < 0.85 * count_macs(model, one)


@pytest.mark.parametrize("family", ["vit", "no-class-token", "hf-vit", "hf-dinov2"])
def test_operations_are_counted_with_merging(family: str) -> None:
    """torch's counter sees what block_macs computes from shapes, the products of the merge included."""
    model, batch = models.build(family), models.batches(family)[0]
    path, prefix = PLACES[family]
    one = batch[:1] if isinstance(batch, Tensor) else {key: value[:1] for key, value in batch.items()}
    blocks = list(model.get_submodule(path).children())
    for schedule in ((3, 0), (4, 2)):
        left, saved = 16 + prefix, 0
        for block, r in zip(blocks, schedule, strict=True):
            saved += block_macs(block, 16 + prefix) - block_macs(block, left, r, prefix)
            left -= r
        found = count_macs(model, one) - count_macs(merged(model, schedule, family), one)
        assert found == saved > 0


@pytest.mark.parametrize("family", ["vit", "hf-vit", "hf-dinov2"])
def test_sites_keep_their_names(family: str) -> None:
    model = models.build(family)
    for site in find_sites(model):
        assert merged(model, (3, 0), family).get_submodule(site.down if site.kind != "attn" else site.name) is not None
    assert list(merged(model, (3, 0), family).state_dict()) == list(model.state_dict())


def test_blocks_that_are_called_one_by_one_stay_dense() -> None:
    model, batch = models.build("vit"), models.batches("vit")[0]
    expected = model.forward_intermediates(batch, intermediates_only=True)  # type: ignore[operator]
    found = merged(model, (3, 3)).forward_intermediates(batch, intermediates_only=True)  # type: ignore[operator]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_features_of_several_blocks_give_every_patch_its_groups_value() -> None:
    model, batch = models.build("dinov2-registers"), models.batches("dinov2-registers")[0]
    made: Any = merged(model, (3, 2), "dinov2-registers", unmerge=True)
    found = made.forward_intermediates(batch, intermediates_only=True, output_fmt="NLC")
    x = made.patch_embed(batch)
    x = made._pos_embed(x)
    sizes, groups = x.new_ones(x.shape[:2]), torch.arange(x.shape[1]).expand(x.shape[:2])
    for features, block, left in zip(found, made.blocks.children(), (18, 16), strict=True):
        x, sizes, groups = block(x, sizes=sizes, groups=groups)
        assert x.shape[1] == left
        for sample in range(len(batch)):
            torch.testing.assert_close(features[sample], x[sample, groups[sample]][5:])
    torch.testing.assert_close(made.forward_features(batch)[:, 5:], made.norm(found[-1]))
    early = made.forward_intermediates(batch, [0], intermediates_only=True, output_fmt="NLC", stop_early=True)
    torch.testing.assert_close(early[0], found[0])
    first, second = made.blocks
    first(x)
    with pytest.raises(ModelError, match="unchanged"):
        second(x)


def test_merging_is_replaced_copied_and_pickled() -> None:
    model, batch = models.build("vit"), models.batches("vit")[0]
    once = merged(model, (3, 2))
    assert [block.weighted for block in once.get_submodule("blocks").children()] == [False, True]
    expected = models.run(once, batch)
    assert not torch.allclose(expected, models.run(model, batch))
    for same in (copy.deepcopy(once), pickle.loads(pickle.dumps(once)), merged(merged(model, (1, 0)), (3, 2))):
        torch.testing.assert_close(models.run(same, batch), expected)
    torch.testing.assert_close(models.run(merged(once, (0, 0)), batch), models.run(model, batch))
    half = copy.deepcopy(once).bfloat16()
    assert (models.run(half, batch.bfloat16()).double() - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("family", by_kind(["vit", "hf-vit"]))
def test_graphs_with_merging_take_any_number_of_images(family: str, tmp_path: Path) -> None:
    model = merged(models.build(family, torch.float32), (4, 0), family, read=1)
    batch = models.batches(family, dtype=torch.float32)[0]
    for target in ("onnx", "pt2"):
        assert write_format(model, tmp_path, target, batch) < 1e-5
    name, images = ("input", batch) if isinstance(batch, Tensor) else next(iter(batch.items()))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    exported: Any = torch.export.load(tmp_path / "model.pt2").module()
    for size in (1, 5):
        some = {name: images[:size]}
        expected = models.run(model, images[:size] if name == "input" else some)
        assert torch.allclose(
            torch.from_numpy(session.run(None, {name: images[:size].numpy()})[0]), expected, atol=1e-5
        )
        found = exported(images[:size]) if name == "input" else exported(**some)["logits"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", by_kind(["vit", "hf-vit"]))
def test_merged_models_compile_as_one_graph(family: str) -> None:
    model, batch = merged(models.build(family), (4, 2), family), models.batches(family)[0]
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(models.run(compiled, batch), models.run(model, batch))


@pytest.mark.parametrize("family", ["relative-position-bias", "post-norm", "parallel-things"])
def test_other_blocks_are_refused(family: str) -> None:
    model = models.build(family)
    with pytest.raises(ModelError, match=r"tokens cannot be merged in blocks\.0: .* is not a plain pre-norm block"):
        merge_tokens(model, Merging("blocks", (2, 0), 0))


def test_requests_that_do_not_fit_are_refused() -> None:
    model = models.build("hf-vit")
    with pytest.raises(PlanError, match=r"the schedule has 3 entries, vit\.layers 2 blocks"):
        merge_tokens(model, Merging("vit.layers", (1, 1, 1), 1))
    with pytest.raises(ModelError, match="vit is a ViTModel, not a sequence of blocks"):
        merge_tokens(model, Merging("vit", (1, 1), 1))
    with pytest.raises(ModelError, match="take no attention mask"):
        merged(model, (1, 0), "hf-vit").get_submodule("vit.layers")(torch.zeros(1, 5, 24), torch.ones(1, 5))


def test_rows_are_taken_sample_by_sample() -> None:
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert rows(x, torch.tensor([[2, 0], [1, 1]])).tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]


@pytest.mark.parametrize("family", ["vit", "hf-vit"])
def test_operations_of_a_last_block_that_computes_what_is_read_are_counted(family: str) -> None:
    model, batch = models.build(family), models.batches(family)[0]
    path, prefix = PLACES[family]
    one = batch[:1] if isinstance(batch, Tensor) else {key: value[:1] for key, value in batch.items()}
    last = list(model.get_submodule(path).children())[-1]
    saved = block_macs(last, 16 + prefix) - block_macs(last, 16 + prefix, read=prefix)
    assert count_macs(model, one) - count_macs(merged(model, (0, 0), family, read=prefix), one) == saved > 0
    with pytest.raises(ModelError, match="Linear is not a plain pre-norm block"):
        block_macs(nn.Linear(2, 2), 4)


@pytest.mark.parametrize(("patches", "left"), [(7, 4), (6, 3), (2, 1), (1, 1)])
def test_at_most_half_of_the_patches_are_merged(patches: int, left: int) -> None:
    block: Any = next(merged(models.build("vit"), (100, 0)).get_submodule("blocks").children())
    x = torch.randn(2, 1 + patches, 24, generator=seeded(4), dtype=torch.float64)
    groups = torch.arange(1 + patches).expand(2, -1)
    y, sizes, found = block(x, sizes=x.new_ones(x.shape[:2]), groups=groups)
    assert y.shape == (2, 1 + left, 24)
    assert sizes.sum(1).tolist() == [1 + patches] * 2
    assert sizes[:, 0].tolist() == [1, 1]
    assert sorted(set(found.flatten().tolist())) == list(range(1 + left))


def test_slices_of_merged_blocks_run_what_they_hold() -> None:
    model, x = models.build("vit"), torch.randn(2, 9, 24, generator=seeded(5), dtype=torch.float64)
    made: Any = merged(model, (3, 2), unmerge=True).get_submodule("blocks")
    dense: Any = model.get_submodule("blocks")
    first, second = made.children()
    assert made[1] is second
    torch.testing.assert_close(made[1:](x), dense[1](x))  # later ones alone are dense
    y, _, groups = first(x, sizes=x.new_ones(x.shape[:2]), groups=torch.arange(9).expand(2, -1))
    torch.testing.assert_close(made[:1](x), rows(y, groups))
    torch.testing.assert_close(made[:2](x), made(x))
    plain: Any = merged(model, (3, 2)).get_submodule("blocks")
    torch.testing.assert_close(plain[:2](x), dense(x))
    listed: Any = merged(models.build("hf-vit"), (3, 2), "hf-vit").get_submodule("vit.layers")
    assert list(listed) == [listed]
    assert type(listed[:1]) is nn.ModuleList
    assert listed[1] is list(listed.children())[1]


def test_masks_that_hide_nothing_are_accepted() -> None:
    layers: Any = merged(models.build("hf-vit"), (1, 0), "hf-vit").get_submodule("vit.layers")
    x = torch.randn(1, 5, 24, generator=seeded(6), dtype=torch.float64)
    expected = layers(x)
    for mask in (torch.zeros(1, 1, 5, 5, dtype=torch.float64), torch.ones(1, 1, 5, 5, dtype=torch.bool)):
        assert torch.equal(layers(x, mask), expected)
    for mask in (torch.full((1, 5), -1.0), torch.tensor([[True, True, True, True, False]])):
        with pytest.raises(ModelError, match="take no attention mask"):
            layers(x, mask)
