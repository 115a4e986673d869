"""Tiny random models of transformers' and torch.nn's families, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torchvision.models import VisionTransformer

TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {**TEXT, "ffn_dim": 40, "word_embed_proj_dim": 24}
GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50, "n_positions": 64, "n_inner": 40}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE = {key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
IMAGE |= {"image_size": 16, "patch_size": 4}
DINO = {**IMAGE, "mlp_ratio": 2, "layerscale_value": 0.5}
DECODER = {"is_decoder": True, "add_cross_attention": True}
WHISPER = {
    **{"vocab_size": 50, "num_mel_bins": 8, "d_model": 24, "max_source_positions": 10, "max_target_positions": 64},
    **{f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in (
        ("layers", 2), ("attention_heads", 3), ("ffn_dim", 40))},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"suppress_tokens": None, "begin_suppress_tokens": None},
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How to make a model, one batch for it, and the number of its MLPs and attentions."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    mlps: int = 2
    attentions: int = 2
    causal: int = 0  # of the attentions


def ids(size: int, generator: torch.Generator, length: int = 11) -> Tensor:
    return torch.randint(3, 50, (size, length), generator=generator)


def text(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": ids(size, g)}


def image(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, 16, 16, generator=g)}


def pixels(size: int, g: torch.Generator) -> Tensor:
    return torch.randn(size, 3, 16, 16, generator=g)


def crossed(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {**text(size, g), "encoder_hidden_states": torch.randn(size, 7, 24, generator=g)}


def speech(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"input_features": torch.randn(size, 8, 20, generator=g), "decoder_input_ids": ids(size, g)}


def tokens(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"src": torch.randn(size, 11, 24, generator=g)}


def with_memory(size: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"tgt": torch.randn(size, 11, 24, generator=g), "memory": torch.randn(size, 7, 24, generator=g)}


class Sequence(nn.Module):
    """A user's own model around torch.nn's layers, batch first outside whatever it is inside."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=batch_first, norm_first=norm_first, dropout=0.0)
        self.batch_first = batch_first
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first)

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        src = src if self.batch_first else src.transpose(0, 1)
        y: Tensor = self.encoder(src, src_key_padding_mask=src_key_padding_mask)
        return y if self.batch_first else y.transpose(0, 1)


class Captioner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 40, batch_first=True, dropout=0.0), 2)

    def forward(self, tgt: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        y: Tensor = self.decoder(tgt, memory, tgt_mask=mask, tgt_is_causal=True)
        return y


class ResidualAttentionBlock(nn.Module):
    """The block that open_clip and CLIP's own code build their towers of."""

    __module__ = "open_clip.transformer"

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(24), nn.LayerNorm(24)
        self.attn = nn.MultiheadAttention(24, 4, batch_first=True)
        self.mlp = nn.Sequential()
        for name, part in (("c_fc", nn.Linear(24, 40)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(40, 24))):
            self.mlp.add_module(name, part)

    def forward(self, src: Tensor) -> Tensor:
        x = self.ln_1(src)
        src = src + self.attn(x, x, x, need_weights=False)[0]
        return src + self.mlp(self.ln_2(src))


class Tower(nn.Sequential):
    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src)


FAMILIES: dict[str, Family] = {
    "hf-opt": Family(lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT)), text, causal=2),
    "hf-opt-post-norm": Family(
        lambda: hf.OPTForCausalLM(hf.OPTConfig(**{**OPT, "word_embed_proj_dim": 16}, do_layer_norm_before=False)),
        text,
        causal=2,
    ),
    "hf-opt-no-biases": Family(lambda: hf.OPTModel(hf.OPTConfig(**OPT, enable_bias=False)), text, causal=2),
    "hf-gpt2": Family(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), text, causal=2),
    "hf-gpt2-cross": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(**GPT2, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
        ),
        crossed,
        attentions=4,
        causal=2,
    ),
    "hf-bert": Family(lambda: hf.BertModel(hf.BertConfig(**TEXT)), text),
    "hf-bert-decoder": Family(
        lambda: hf.BertLMHeadModel(hf.BertConfig(**TEXT, **DECODER)), crossed, attentions=4, causal=2
    ),
    "hf-roberta": Family(lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT)), text),
    "hf-xlm-roberta": Family(lambda: hf.XLMRobertaModel(hf.XLMRobertaConfig(**TEXT)), text),
    "hf-camembert": Family(lambda: hf.CamembertModel(hf.CamembertConfig(**TEXT)), text),
    "hf-electra": Family(lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=16)), text),
    "hf-distilbert": Family(
        lambda: hf.DistilBertModel(
            hf.DistilBertConfig(dim=24, n_layers=2, n_heads=3, hidden_dim=40, vocab_size=50, max_position_embeddings=64)
        ),
        text,
    ),
    "hf-mpnet": Family(lambda: hf.MPNetModel(hf.MPNetConfig(**TEXT)), text),
    "hf-vit": Family(lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)), image),
    "hf-deit": Family(lambda: hf.DeiTModel(hf.DeiTConfig(**IMAGE)), image),
    "hf-dinov2": Family(lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO)), image),
    "hf-dinov2-swiglu": Family(lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO, use_swiglu_ffn=True)), image),
    "hf-dinov2-registers": Family(
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=2)), image
    ),
    "hf-clip": Family(
        lambda: hf.CLIPModel(hf.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=8)),
        lambda size, g: {**text(size, g), **image(size, g)},
        mlps=4,
        attentions=4,
        causal=2,
    ),
    "hf-siglip": Family(
        lambda: hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=IMAGE)),
        lambda size, g: {**text(size, g), **image(size, g)},
        mlps=5,
        attentions=5,
    ),
    "hf-whisper": Family(
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        speech,
        mlps=4,
        attentions=6,
        causal=2,
    ),
    "torch-encoder": Family(lambda: Sequence(batch_first=True), tokens),
    "torch-encoder-sequence-first": Family(lambda: Sequence(batch_first=False, norm_first=True), tokens),
    "torch-decoder": Family(Captioner, with_memory, attentions=4),
    "torchvision-vit": Family(
        lambda: VisionTransformer(16, 4, num_layers=2, num_heads=4, hidden_dim=24, mlp_dim=40, num_classes=5), pixels
    ),
    "open-clip-tower": Family(lambda: Tower(ResidualAttentionBlock(), ResidualAttentionBlock()), tokens),
}

OUTPUTS = ("logits", "last_hidden_state", "text_embeds", "image_embeds", "pooler_output")


def output_of(result: Any) -> Tensor:
    """What a model computed, as one tensor."""
    if isinstance(result, Tensor):
        return result
    found = [result[key].flatten(1) for key in OUTPUTS if result.get(key) is not None]
    return torch.cat(found, dim=1)
