"""Every table and figure of the paper that can be made here, and docs/results.md with our numbers beside its own.

    python -m benchmarks.paper                      everything; sections one by one:
    python -m benchmarks.paper accuracy             DeiT-Tiny's real weights and images (CORP_ASSETS/vision)
    python -m benchmarks.paper redundancy           the same
    python -m benchmarks.paper cost opt speed runtime   the paper's architectures, random weights
    python -m benchmarks.paper page                 docs/results.md from what was measured

Accuracy takes about half an hour on two cores; a killed run goes on where it was (build/paper).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import corp
from benchmarks import paper_page
from benchmarks.paper_numbers import DINOV2, MODELS, SPARSITIES
from benchmarks.params import shapes_only_plan
from corp.calibration.settings import Settings
from corp.io.observer import timing
from corp.measure.cost import count_macs, count_params
from corp.measure.timing import interleave, speed_up, summarize
from corp.recipe import Recipe
from corp.surgery.apply import shrink

# isort: split
import timm

ROOT = Path(__file__).parent.parent
RESULTS, WORK = ROOT / "benchmarks" / "results", ROOT / "build" / "paper"
KINDS = {"mlp": (1, 0), "attn": (0, 1), "both": (1, 1)}
# Sweeps of corp's own command: name -> its options. One calibration serves the first three.
SWEEPS = {
    "sizes": "--calib-sizes 100,500,1000 --sparsity 0.5",
    "curves": "--sparsity 0.1:0.7:0.2 --kinds mlp,attn,both --compensate full,none",
    "rankings": "--sparsity 0.5 --rank combined,activation,magnitude,active --compensate full,none",
    "presets": "--sparsity 0.3,0.5,0.7 --kinds mlp --preset paper,grail,vbp",
}
SPEED_MODELS = {"Tiny": 16, "Small": 8, "Base": 4}  # batch for throughput
TIMED_ONCE = {"Large": 1, "Huge": 1}  # seconds per image here: dense and 50 % only
RUNTIME_IMAGES = {"Tiny": 256, "Small": 128, "Base": 64}


def accuracy() -> dict[str, Any]:
    """corp sweep, as a user calls it."""
    vision = _assets() / "vision"
    name = MODELS["Tiny"]
    found = {}
    for what, options in SWEEPS.items():
        out = WORK / what
        if not out.exists():
            source = ["--calib", vision / "calibration"] if what == "sizes" else ["--stats", WORK / "sizes/statistics"]
            command = [sys.executable, "-m", "corp", "sweep", name, "--weights", vision / f"{name}.safetensors"]
            command += [*source, *options.split(), "--data", vision / "imagenet-sample", "-o", out, "--json"]
            out.parent.mkdir(parents=True, exist_ok=True)
            print(what, flush=True)
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
        content = json.loads((out / "sweep.json").read_text())
        found[what] = {"dense": content["dense"], "runtime": content["runtime"], "rows": content["rows"]}
        for picture in out.glob("*.svg"):
            (ROOT / "docs" / "figures").mkdir(exist_ok=True)
            (ROOT / "docs" / "figures" / f"{what}-{picture.name}").write_bytes(picture.read_bytes())
    return found


def redundancy() -> list[dict[str, Any]]:
    """corp analyze on the statistics of the accuracy section."""
    vision, name = _assets() / "vision", MODELS["Tiny"]
    if not (WORK / "sizes").exists():
        sys.exit("redundancy reads the statistics of: python -m benchmarks.paper accuracy")
    command = [sys.executable, "-m", "corp", "analyze", name, "--weights", vision / f"{name}.safetensors"]
    command += ["--stats", WORK / "sizes" / "statistics", "--json"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True)
    return [row for row in json.loads(done.stdout)["rows"] if row["what"] == "mlp"]


def pruned_shapes(name: str, mlp: float, attn: float, device: str = "meta", **args: Any) -> torch.nn.Module:
    """The architecture with random weights (or none), narrowed to these sparsities."""
    with torch.device(device):
        model = timm.create_model(name, **args).eval()
    shrink(model, corp.find_sites(model), shapes_only_plan(model, Recipe.paper(mlp=mlp, attn=attn)))
    return model


def cost() -> dict[str, Any]:
    """Parameters and MACs of tab:corp_full and tab:efficiency_all; parameters of tab:dinov2_results."""
    found: dict[str, Any] = {"deit": {}, "dinov2": {}}
    for size, name in MODELS.items():
        cases = {f"{kind} {s}": (s * a, s * b) for kind, (a, b) in KINDS.items() for s in SPARSITIES}
        found["deit"][size] = {case: _cost(name, *pair) for case, pair in cases.items()}
        print(size, found["deit"][size]["both 0.5"], flush=True)
    for size, (name, *_) in DINOV2.items():
        found["dinov2"][size] = [count_params(pruned_shapes(name, s, s)) for s in (0.0, 0.5)]
    return found


def _cost(name: str, mlp: float, attn: float) -> dict[str, int]:
    model = pruned_shapes(name, mlp, attn)
    return {"params": count_params(model), "macs": count_macs(model, torch.zeros(1, 3, 224, 224, device="meta"))}


def opt() -> dict[str, Any]:
    """OPT-1.3B's shapes at 30 %: parameters, also with the tied embedding counted twice; operations of 2,048 tokens."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"hidden_size": 2048, "word_embed_proj_dim": 2048, "ffn_dim": 8192, "num_hidden_layers": 24}
    config = OPTConfig(**sizes, num_attention_heads=32, max_position_embeddings=2048, use_cache=False)
    tokens = {"input_ids": torch.zeros(1, 2048, dtype=torch.long, device="meta")}
    found = {}
    for name, (mlp, attn) in {"dense": (0, 0), "MLP": (0.3, 0), "Q/K": (0, 0.3), "both": (0.3, 0.3)}.items():
        with torch.device("meta"):
            model: Any = OPTForCausalLM(config).eval()
        shrink(model, corp.find_sites(model), shapes_only_plan(model, Recipe.paper(mlp=mlp, attn=attn)))
        twice = model.model.decoder.embed_tokens.weight.numel()
        found[name] = {"params": count_params(model), "twice": count_params(model) + twice}
        found[name]["flops"] = 2 * count_macs(model, tokens)
        print(name, found[name], flush=True)
    dense, head = found["dense"], 64 * (3 * 2049 + 2048)  # rows of q, k, v with their biases, columns of the output
    flops = 2 * 2048 * 24 * 9 * (64 * 4 * 2048 + 2 * 64 * 2048)
    found["9 of 32 heads"] = {"twice": dense["twice"] - 24 * 9 * head, "flops": dense["flops"] - flops}
    found["9 of 32 heads"]["params"] = dense["params"] - 24 * 9 * head
    return found


def speed() -> dict[str, Any]:
    """Latency at batch 1 and throughput, all sparsities interleaved; ratios to dense with their intervals."""
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "models": {}}
    for size, batch in {**SPEED_MODELS, **TIMED_ONCE}.items():
        shares = SPARSITIES if size in SPEED_MODELS else (0.0, 0.5)
        models = [pruned_shapes(MODELS[size], s, s, "cpu") for s in shares]
        rows: list[dict[str, Any]] = [{"sparsity": s} for s in shares]
        for what, n in (("latency", 1), ("throughput", batch)):
            if what == "throughput" and batch == 1:
                break
            x = torch.randn(n, 3, 224, 224)
            with torch.inference_mode():
                rounds = interleave([partial(model, x) for model in models], rounds=7, warm_up=1)
            for row, times in zip(rows, rounds, strict=True):
                row[what] = {"seconds": summarize(times).p50 / n, "ratio": speed_up(rounds[0], times).to_dict()}
        found["models"][size] = {"batch": batch, "rows": rows}
        print(size, json.dumps(rows[-1]), flush=True)
    return found


def runtime() -> dict[str, Any]:
    """tab:runtime: seconds per image of calibrating, and of ranking and compensating at 50 %."""
    found = {}
    for size, images in RUNTIME_IMAGES.items():
        model = timm.create_model(MODELS[size]).eval()
        batches = [torch.randn(32, 3, 224, 224) for _ in range(images // 32)]
        start = time.perf_counter()
        stats = corp.calibrate(model, batches, settings=Settings("all"))
        calibrated = time.perf_counter() - start
        with timing() as seconds:
            corp.apply(model, stats, corp.plan(model, stats, Recipe.paper(mlp=0.5, attn=0.5)))
        found[size] = {"images": images, "calibrate": calibrated, **seconds}
        print(size, found[size], flush=True)
    return found


def page() -> None:
    (ROOT / "docs" / "results.md").write_text(paper_page.compose(_read), encoding="utf-8")


def _read(section: str) -> Any:
    return json.loads((RESULTS / f"paper_{section}.json").read_text())


def _assets() -> Path:
    assets = os.environ.get("CORP_ASSETS", "")
    if not assets:
        sys.exit("CORP_ASSETS is not set: this section needs real weights and images")
    return Path(assets)


SECTIONS: dict[str, Callable[[], Any]] = {
    "cost": cost, "opt": opt, "accuracy": accuracy, "redundancy": redundancy, "runtime": runtime, "speed": speed,
}  # fmt: skip


def main() -> None:
    wanted = sys.argv[1:] or [*SECTIONS, "page"]
    if unknown := set(wanted) - {*SECTIONS, "page"}:
        sys.exit(f"unknown section(s) {', '.join(unknown)}; there are {', '.join(SECTIONS)}, page")
    for section in (name for name in wanted if name != "page"):
        found = SECTIONS[section]()
        (RESULTS / f"paper_{section}.json").write_text(json.dumps(found, indent=1) + "\n")
    if "page" in wanted:
        page()


if __name__ == "__main__":
    main()
