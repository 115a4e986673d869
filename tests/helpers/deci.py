"""What vLLM reads in a DeciLM folder, written out in plain torch: its fields, and a Llama of these sizes in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu


class Deci:
    """The model in a folder. Every tensor must be used, and a bias flag means that every bias is there."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.state = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self.used: set[str] = set()

    def logits(self, ids: Tensor) -> Tensor:
        """(n, vocabulary) of one sequence of ids (n,)."""
        h = self.take("model.embed_tokens.weight")[ids]
        for number, block in enumerate(self.config["block_configs"]):
            assert not block["attention"]["no_op"]
            assert not block["ffn"]["no_op"]
            at = f"model.layers.{number}."
            h = h + self.attention(self.norm(h, f"{at}input_layernorm"), f"{at}self_attn.", block["attention"])
            h = h + self.mlp(self.norm(h, f"{at}post_attention_layernorm"), f"{at}mlp.", block["ffn"])
        head = "model.embed_tokens" if self.config["tie_word_embeddings"] else "lm_head"
        made = self.norm(h, "model.norm") @ self.take(f"{head}.weight").T
        assert self.used == set(self.state), set(self.state) - self.used
        return made

    def width(self, ffn: dict[str, Any]) -> int:
        """vLLM takes ffn_mult first, and rounds up what it gives."""
        if "ffn_mult" not in ffn:
            return int(ffn["intermediate_size"])
        width = int(2 * ffn["ffn_mult"] * self.config["hidden_size"] / 3)
        return width + -width % 256

    def mlp(self, x: Tensor, at: str, ffn: dict[str, Any]) -> Tensor:
        gate, up = (self.project(x, f"{at}{name}_proj", "mlp_bias") for name in ("gate", "up"))
        assert gate.shape[-1] == self.width(ffn)
        return self.project(silu(gate) * up, f"{at}down_proj", "mlp_bias")

    def attention(self, x: Tensor, at: str, fields: dict[str, Any]) -> Tensor:
        heads, width = self.config["num_attention_heads"], self.config["head_dim"]
        q, k, v = (
            self.project(x, f"{at}{one}_proj", "attention_bias").unflatten(1, (-1, width)).transpose(0, 1)
            for one in "qkv"
        )
        assert len(q) == heads
        assert len(k) == len(v) == heads // fields["n_heads_in_group"]
        angles = torch.arange(len(x))[:, None] * self.frequencies()  # (n, width / 2)
        q, k = self.turn(q, angles), self.turn(k, angles).repeat_interleave(fields["n_heads_in_group"], 0)
        logits = q @ k.mT / width**0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
        y = logits.softmax(-1) @ v.repeat_interleave(fields["n_heads_in_group"], 0)
        return self.project(y.transpose(0, 1).flatten(1), f"{at}o_proj", "attention_bias")

    def frequencies(self) -> Tensor:
        rope, width = self.config["rope_parameters"], self.config["head_dim"]
        plain = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        if rope["rope_type"] == "default":
            return plain
        assert rope["rope_type"] == "longrope"
        # Equal lengths: vLLM then multiplies by no factor of its own.
        assert rope["original_max_position_embeddings"] == self.config["max_position_embeddings"]
        assert rope["short_factor"] == rope["long_factor"]
        return plain / torch.tensor(rope["short_factor"], dtype=torch.float64)

    @staticmethod
    def turn(x: Tensor, angles: Tensor) -> Tensor:
        """Pairs (j, j + width/2), as one complex number each."""
        rotated = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([rotated.real, rotated.imag], -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        power = x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x * power.rsqrt() * self.take(f"{name}.weight")

    def project(self, x: Tensor, name: str, flag: str) -> Tensor:
        bias = self.take(f"{name}.bias") if self.config[flag] else None
        return linear(x, self.take(f"{name}.weight"), bias)

    def take(self, name: str) -> Tensor:
        self.used.add(name)
        return self.state[name]
