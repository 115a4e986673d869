"""Prune a speech model and a vision-language model on what their processors make.

python examples/speech_and_images.py

Both models are small and random so that this runs anywhere; with real ones, replace `speech()` by
`Wav2Vec2ForCTC.from_pretrained(...)` and the waves by your recordings. A processor returns a dict of the model's own
arguments, masks included, which is all that corp needs. Every tower is found: see the printed sites.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

import corp

RECIPE = corp.Recipe(mlp=0.3, attn=0.3)


def speech() -> tuple[Any, list[Any]]:
    """wav2vec2, HuBERT, WavLM and Moonshine: waves of different lengths, padded by the feature extractor."""
    config = transformers.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    draw = np.random.default_rng(0)
    waves = [[draw.standard_normal(n).astype("float32") for n in (1600, 1500, 1400, 1600)] for _ in range(8)]
    batches = [extractor(some, sampling_rate=16_000, padding=True, return_tensors="pt") for some in waves]
    return transformers.Wav2Vec2ForCTC(config).eval(), batches


def images_and_text() -> tuple[Any, list[Any]]:
    """LLaVA, Qwen2-VL, SmolVLM and BLIP: images beside texts in which placeholders mark their places."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    text = transformers.LlamaConfig(**sizes, vocab_size=100)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=99)
    ids = torch.randint(3, 90, (8, 4, 12))
    ids[..., :4] = config.image_token_id  # the four patches of an image
    batches = [
        {"input_ids": some, "attention_mask": torch.ones_like(some), "pixel_values": torch.randn(4, 3, 28, 28)}
        for some in ids
    ]
    return transformers.LlavaForConditionalGeneration(config).eval(), batches


def main() -> None:
    torch.manual_seed(0)
    for model, batches in (speech(), images_and_text()):
        print(corp.find_sites(model, batches[0]))
        print(corp.prune(model, batches, RECIPE).report)


if __name__ == "__main__":
    main()
