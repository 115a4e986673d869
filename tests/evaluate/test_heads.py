"""Heads: files that describe themselves, backbones of both libraries under them, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import corp
from corp.evaluate.heads import (
    HeadInfo,
    LinearHead,
    OwnMaps,
    UpsamplingHead,
    WithHead,
    load_head,
    patch_map,
    save_head,
)
from tests.helpers.models import build, images


def filled(head: nn.Module) -> nn.Module:
    for tensor in head.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand_like(tensor) + 0.1)
    return head.eval()


@pytest.mark.parametrize("head", [LinearHead(6, 3), LinearHead(6, 1, least=1e-3), UpsamplingHead([6, 5, 4], 2)])
def test_a_head_comes_back_from_its_file(tmp_path: Path, head: LinearHead | UpsamplingHead) -> None:
    task = "depth" if isinstance(head, LinearHead) and head.least else "segmentation"
    info = HeadInfo(task, 2, 11, (28, 42))
    save_head(filled(head), info, tmp_path / "new" / "head.safetensors")  # type: ignore[arg-type]
    loaded, known = load_head(tmp_path / "new" / "head.safetensors")
    x = torch.randn(2, 6, 3, 4)
    assert known == info
    assert torch.equal(loaded(x), head(x))
    with pytest.raises(corp.CorpError, match="exists"):
        save_head(head, info, tmp_path / "new" / "head.safetensors")
    save_head(head, info, tmp_path / "new" / "head.safetensors", overwrite=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["head.safetensors"]


def test_the_upsampling_head_is_its_layers_in_a_row_and_loads_in_half_precision(tmp_path: Path) -> None:
    layers = nn.Sequential(
        nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.BatchNorm2d(3), nn.ReLU(),
        nn.ConvTranspose2d(3, 2, 4, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 1),
    )  # fmt: skip
    filled(layers)
    names = {"0": "upconv1", "1": "bn1", "3": "upconv2", "4": "bn2", "6": "final_conv"}
    state = {f"{names[key.split('.')[0]]}.{key.split('.')[1]}": value for key, value in layers.state_dict().items()}
    stored = {key: value.half() for key, value in state.items() if "num_batches" not in key}  # as the package does
    save_file(stored, tmp_path / "head.safetensors")
    layers.load_state_dict(
        {k: v.half().float() if v.is_floating_point() else v for k, v in layers.state_dict().items()}
    )
    head, info = load_head(tmp_path / "head.safetensors")
    x = torch.randn(1, 4, 3, 5)
    assert info == HeadInfo()
    assert head(x).shape == (1, 1, 12, 20)
    torch.testing.assert_close(head(x), layers(x))


def test_files_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(corp.CorpError, match="cannot be read as a head"):
        load_head(path)
    path.write_text("no tensors")
    with pytest.raises(corp.CorpError, match="cannot be read as a head"):
        load_head(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(corp.CorpError, match="not a head that corp knows"):
        load_head(path)
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(5)}, path)
    with pytest.raises(corp.CorpError, match="does not fit LinearHead"):
        load_head(path)
    for text, message in (
        ("{", "not JSON"),
        ('{"kind": "new"}', "does not know"),
        ('{"task": "pose"}', "not one of segmentation, depth"),
        ('{"blocks": 0}', "at least one block"),
        ('{"image_size": [1]}', "not \\(height, width\\)"),
    ):
        save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, path, {"corp_head": text})
        with pytest.raises(corp.CorpError, match=message):
            load_head(path)


class Pixels(nn.Module):
    """A backbone whose patch tokens are the pixels themselves, behind prefix tokens."""

    def __init__(self, prefix: int = 2) -> None:
        super().__init__()
        self.num_prefix_tokens = prefix

    def forward_features(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT  # (B, h w, 3)
        return torch.cat([torch.full_like(tokens[:, :2], 9.0), tokens], 1)


def test_the_map_of_patches_is_the_image_also_when_it_is_not_square() -> None:
    x = torch.randn(2, 3, 4, 6)
    torch.testing.assert_close(patch_map(Pixels(), x), x)
    with pytest.raises(corp.CorpError, match="do not fill a grid"):
        patch_map(Pixels(1), x)
    with pytest.raises(corp.CorpError, match="reads 2 blocks, but Pixels gives the features of 1"):
        patch_map(Pixels(), x, 2)
    with pytest.raises(corp.CorpError, match="no forward_features"):
        patch_map(nn.Linear(2, 2), x)


@pytest.mark.parametrize("family", ["dinov2", "dinov2-registers", "no-class-token", "relative-position"])
def test_features_of_several_blocks_are_behind_the_final_norm_without_prefix_tokens(family: str) -> None:
    backbone, x = build(family), images(1, 2)[0]
    taken: list[Tensor] = []
    for block in backbone.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: taken.append(output.detach()))
    with torch.no_grad():
        found = patch_map(backbone, x, 2)
        expected = [backbone.norm(tokens)[:, backbone.num_prefix_tokens :] for tokens in taken]
        final = backbone.forward_features(x)[:, backbone.num_prefix_tokens :]
    torch.testing.assert_close(found, torch.cat([e.mT.reshape(2, 24, 4, 4) for e in expected], 1))
    torch.testing.assert_close(found[:, 24:], final.mT.reshape(2, 24, 4, 4))
    with pytest.raises(corp.CorpError, match="reads 3 blocks"):
        patch_map(backbone, x, 3)


@pytest.mark.parametrize("registers", [0, 4])
def test_backbones_of_transformers_give_the_same_maps(registers: int) -> None:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 28, "patch_size": 7}
    model = (
        transformers.Dinov2WithRegistersModel(
            transformers.Dinov2WithRegistersConfig(**sizes, num_register_tokens=registers)
        )
        if registers
        else transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    ).eval()
    x = torch.randn(2, 3, 28, 42)
    with torch.no_grad():
        found, last = patch_map(model, x, 2), model(pixel_values=x).last_hidden_state
    assert found.shape == (2, 48, 4, 6)
    torch.testing.assert_close(found[:, 24:], last[:, 1 + registers :].mT.reshape(2, 24, 4, 6))


def test_a_head_of_another_width_is_refused() -> None:
    with pytest.raises(corp.CorpError, match=r"reads 36 channels, but 2 block\(s\) of VisionTransformer give 48"):
        WithHead(build("dinov2"), LinearHead(36, 2), 2)
    assert WithHead(build("dinov2"), nn.Conv2d(24, 2, 1).double()).eval()(images(1, 1)[0]).shape == (1, 2, 4, 4)


def test_a_model_without_maps_is_refused() -> None:
    model = transformers.Dinov2Model(
        transformers.Dinov2Config(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=14, patch_size=7
        )
    )
    with pytest.raises(corp.CorpError, match="predicts no map"):
        OwnMaps(model)(torch.zeros(1, 3, 14, 14))
