"""Write tests/golden: small folders of every kind that corp saves, which later versions must still read.

python -m scripts.golden    # once per change of a format; the test beside the folders says what must not change
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import corp
from corp.calibration.moments import mirrored
from corp.calibration.statistics import Statistics
from corp.errors import CorpWarning
from corp.recipe import Recipe

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
EXPECTED = "expected.json"
SHAPES = Recipe(mlp=0.5, attn=0.5, vo=0.25)


def image_model() -> nn.Module:
    import timm  # after corp, which makes a torchvision importable that does not fit torch

    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}
    return _filled(timm.create_model("vit_tiny_patch16_224", pretrained=False, **sizes))


def language_model() -> nn.Module:
    import transformers

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 32}
    tokens = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.LlamaConfig(**heads, **tokens, num_hidden_layers=2, max_position_embeddings=32)
    return _filled(transformers.LlamaForCausalLM(config))


def _filled(model: nn.Module) -> nn.Module:
    """The model with weights that have the same bits on every processor, as initial weights drawn by torch do not."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.double().named_parameters():
            if parameter.ndim > 1 or name.endswith("bias"):
                drawn = torch.randint(-128, 129, parameter.shape, generator=generator)
                parameter.copy_(drawn / (128 * parameter.shape[-1] ** 0.5))
    return model.eval()


def images(seed: int, count: int) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(seed: int, count: int) -> Tensor:
    return torch.randint(2, 32, (count, 24), generator=torch.Generator().manual_seed(seed))


def digests(state: dict[str, Tensor]) -> dict[str, str]:
    """The shape, dtype and bits of every tensor, in short."""
    return {name: f"{t.dtype} {tuple(t.shape)} {_bits(t)}" for name, t in sorted(state.items())}


def sums_of(stats: Statistics) -> dict[str, Tensor]:
    """All tensors of the statistics, by site and field; products whole, of which only the upper triangle counts."""
    return {
        f"{name}/{part}/{key}": mirrored(value.clone()) if key == "outer" else value
        for name in stats.sums
        for part in ("fit", "held")
        for key, value in vars(getattr(stats.sums[name], part)).items()
        if isinstance(value, Tensor)
    }


def outputs(model: nn.Module, inputs: Tensor) -> list[list[float]]:
    """Logits of two samples, at the last token of a text."""
    with torch.inference_mode():
        made = model(inputs)
    logits = made.logits[:, -1] if hasattr(made, "logits") else made
    rows: list[list[float]] = logits.double().tolist()
    return rows


def write(folder: Path) -> None:
    dense, text = image_model(), language_model()
    stats = corp.calibrate(dense, [images(0, 12), images(1, 12)])
    plan = corp.plan(dense, stats, SHAPES)
    compact = corp.apply(dense, stats, plan)
    batches = [{"input_ids": tokens(seed, 16)} for seed in range(2)]
    language = corp.prune(text, batches, Recipe(mlp=0.5, attn=0.5, output=0.5))
    uniform = corp.prune(text, batches, Recipe(mlp=0.5))
    (folder / "plan").mkdir(parents=True)
    stats.save(folder / "statistics")
    plan.save(folder / "plan" / "plan.json")
    corp.save(compact, folder / "compact")
    corp.save(language, folder / "compact-language")
    corp.save(uniform, folder / "export", profile="standard")
    expected = {
        "statistics": {"samples": stats.samples, "sums": digests(sums_of(Statistics.load(folder / "statistics")))},
        "plan": {site.name: [site.kind, site.width, site.keep] for site in plan.sites},
        "compact": _model(compact.model, images(2, 2)),
        "compact-language": _model(language.model, tokens(2, 2)),
        "export": _model(uniform.model, tokens(2, 2)),
    }
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def _model(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    return {"state": digests(dict(model.state_dict())), "outputs": outputs(model, inputs)}


def _bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    warnings.simplefilter("ignore", CorpWarning)
    for path in GOLDEN.iterdir() if GOLDEN.is_dir() else ():
        if path.is_dir() and not path.name.startswith("_"):
            shutil.rmtree(path)
    write(GOLDEN)
    sys.stdout.write(f"{GOLDEN}\n")
