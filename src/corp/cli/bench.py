"""corp bench: what pruning gained on this machine, as ratios with an interval, and why not more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from corp.adapters.registry import find_sites
from corp.calibration.batches import placement, run
from corp.cli import arguments as a
from corp.cli.console import command, note, show_json, show_table
from corp.cli.models import CAUSAL, ENCODER, kind_of, load_model, place
from corp.cli.texts import sequence_length
from corp.errors import CorpError, ModelError, first_line, warn
from corp.measure import timing
from corp.measure.footprint import Sizes, measure_sizes
from corp.recipe import FAST, ROUNDING_KEYS
from corp.sites import AttentionSite, Site
from corp.storage import folder as storage
from corp.storage.rebuilding import rebuild
from corp.surgery.apply import history

SIZES = ("model", "parameters", "MACs", "on disk", "peak memory", "latency p50", "p95", "throughput")
GAINS = ("against {}", "latency", "95 % interval", "throughput", "95 % interval", "ideal", "reached")
SEQ_LEN = 512  # tokens per sequence by default
LATENCY_CALLS = 5  # per round: a percentile needs more calls than a median of rounds
# For each kind: its name in --round-to, and the width that fills kernel tiles.
TILES = {kind: (key, FAST[key]) for kind, key in ROUNDING_KEYS.items()}


@dataclass(frozen=True)
class Contender:
    """A model to time; `dense_widths` are the original widths of its pruned sites."""

    name: str
    model: nn.Module
    dense_widths: dict[str, int]


@dataclass(frozen=True)
class Measured:
    """The measurements of one model."""

    name: str
    sizes: Sizes
    times: timing.Times
    tokens: int | None = None  # per sample, of texts

    def to_dict(self) -> dict[str, Any]:
        found = {"name": self.name, **self.sizes.to_dict(), **self.times.to_dict()}
        return found if self.tokens is None else {**found, "tokens_per_second": self.tokens / self.times.together}


@command
def bench(
    models: Annotated[
        list[str], typer.Argument(help="Saved folders, timm names or hf:FOLDERs; the first is the baseline.")
    ],
    batch: Annotated[int, typer.Option(help="Samples per forward pass for throughput and memory.", min=1)] = 32,
    rounds: Annotated[int, typer.Option(help="Rounds, each of which times every model.", min=timing.MIN_ROUNDS)] = 20,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to torch.", min=0)] = 0,
    input: Annotated[
        str | None, typer.Option(help="Shape of one sample, such as 3x224x224.", show_default="the model's")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sequence, for models that take texts.", min=1, show_default="512, or the context"
        ),
    ] = None,
    device: a.Device = "auto",
    dtype: a.Dtype = "float32",
    json: a.Json = False,
) -> None:
    """Time MODELS against the first of them, or a single pruned folder against its dense model.

    The weights do not affect the time, so timm names and dense models get random weights and nothing is downloaded.
    """
    contenders = gather(models, device, dtype)
    if seq_len is not None and input is not None:
        raise ModelError("give either --seq-len or --input, not both")
    for contender in contenders:
        if seq_len is not None and takes_texts(contender.model):
            sequence_length(contender.model, None, seq_len)  # refuses sequences longer than the context
    shape = common_shape(contenders, input if seq_len is None else str(seq_len))
    with _threads(threads), torch.inference_mode():
        measured = measure(contenders, shape, batch, rounds)
        used = torch.get_num_threads()
    gains = [compare(measured[0], other) for other in measured[1:]]
    pairs = zip(contenders[1:], measured[1:], gains, strict=True)
    causes = [text for c, m, g in pairs for text in explain(c, m.times, g)]
    where = str(placement(contenders[0].model)[0])
    settings = {"device": where, "dtype": dtype, "threads": used, "batch": batch, "rounds": rounds}
    if json:
        entries = [m.to_dict() for m in measured]
        for entry, gain in zip(entries[1:], gains, strict=True):
            entry["speed_up"] = gain.to_dict()
        settings["torch"] = torch.__version__
        show_json({**settings, "input": list(shape), "baseline": 0, "models": entries, "causes": causes})
        return
    _show(measured, gains, settings)
    for text in causes:
        warn(text)


def common_shape(contenders: list[Contender], given: str | None) -> tuple[int, ...]:
    """The shape of one sample, which all models must share so that their times are comparable."""
    if given is not None:
        parts = given.split("x")
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ModelError(f"--input {given!r} should look like 3x224x224")
        return tuple(map(int, parts))
    shapes = {contender.name: sample_shape(contender) for contender in contenders}
    if len(set(shapes.values())) > 1:
        told = ", ".join(f"{name}: {'x'.join(map(str, shape))}" for name, shape in shapes.items())
        raise ModelError(f"these models take different inputs ({told}); give one that all take with --input")
    return next(iter(shapes.values()))


def sample_shape(contender: Contender) -> tuple[int, ...]:
    """The input shape of the model's patch embedding, otherwise that of its configuration."""
    model: Any = contender.model
    if takes_texts(model):
        from corp.adapters import hf_models

        return (min(SEQ_LEN, hf_models.context_length(model) or SEQ_LEN),)
    if isinstance(size := getattr(getattr(model, "config", None), "image_size", None), int):
        return (int(getattr(model.config, "num_channels", 3)), size, size)
    patches: Any = getattr(model, "patch_embed", None)
    if patches is not None and getattr(patches, "img_size", None) is not None:
        return (int(patches.proj.in_channels), *map(int, patches.img_size))
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size is None:
        raise ModelError(
            f"{contender.name} does not state its input shape; give it with --input, such as --input 3x224x224"
        )
    return tuple(map(int, size))


def takes_texts(model: nn.Module) -> bool:
    return kind_of(model) in (CAUSAL, ENCODER)


def measure(contenders: list[Contender], shape: tuple[int, ...], batch: int, rounds: int) -> list[Measured]:
    """Sizes one by one, times of all models in turn: batch 1 first, then `batch`."""
    inputs = {n: [_random(c, (n, *shape)) for c in contenders] for n in (1, batch)}
    try:
        device = next(contenders[0].model.parameters()).device
        calls = {
            n: [timing.complete(partial(run, c.model, x), device) for c, x in zip(contenders, inputs[n], strict=True)]
            for n in inputs
        }
        sizes = [
            measure_sizes(c.model, x, call) for c, x, call in zip(contenders, inputs[1], calls[batch], strict=True)
        ]
        single = timing.interleave(calls[1], rounds=rounds, repeats=LATENCY_CALLS)
        batched = timing.interleave(calls[batch], rounds=rounds)
    except (RuntimeError, AssertionError, TypeError, IndexError, ModelError) as error:  # an input that does not fit
        what = "x".join(map(str, shape))
        raise ModelError(f"a forward pass over {batch} samples of {what} failed: {first_line(error)}") from error
    found = zip(contenders, sizes, single, batched, strict=True)
    tokens = shape[0] if takes_texts(contenders[0].model) else None
    return [Measured(c.name, size, timing.Times(batch, one, many), tokens) for c, size, one, many in found]


def _random(contender: Contender, shape: tuple[int, ...]) -> Any:
    model: Any = contender.model
    first, generator = next(model.parameters()), torch.Generator().manual_seed(0)
    if not takes_texts(model):
        return torch.randn(shape, generator=generator).to(first)
    if len(shape) != 2:
        raise ModelError(f"{contender.name} takes texts: give --seq-len, the tokens per sequence, instead of --input")
    ids = torch.randint(int(model.config.vocab_size), shape, generator=generator).to(first.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def compare(baseline: Measured, other: Measured) -> timing.Gain:
    return timing.gain(baseline.times, other.times, ideal=baseline.sizes.macs / max(1, other.sizes.macs))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _show(measured: list[Measured], gains: list[timing.Gain], settings: dict[str, Any]) -> None:
    title = "{device}, {dtype}, threads: {threads}, rounds: {rounds}; latency at batch 1, the rest at batch {batch}"
    show_table(title.format(**settings), SIZES, [_size_row(m) for m in measured])
    if gains:
        columns = (GAINS[0].format(measured[0].name), *GAINS[1:])
        show_table("speed-up", columns, [_gain_row(m.name, g) for m, g in zip(measured[1:], gains, strict=True)])
        note("ideal: the ratio of MACs; reached: (throughput - 1) / (ideal - 1)")


def _size_row(measured: Measured) -> list[str]:
    sizes, times = measured.sizes, measured.times
    latency, tokens, memory = timing.summarize(times.single), measured.tokens, sizes.weights + sizes.activations
    rate = f"{1 / times.together:.1f} /s" if tokens is None else f"{tokens / times.together:.0f} tokens/s"
    cells = [measured.name, f"{sizes.params / 1e6:.3f} M", f"{sizes.macs / 1e9:.3f} G", f"{sizes.disk / 2**20:.1f} MB"]
    return [*cells, f"{memory / 2**20:.1f} MB", f"{1e3 * latency.p50:.2f} ms", f"{1e3 * latency.p95:.2f} ms", rate]


def _gain_row(name: str, gain: timing.Gain) -> list[str]:
    cells = [name]
    for ratio in (gain.latency, gain.throughput):
        verdict = " within the noise" if ratio.within_noise else ""
        cells += [f"{ratio.value:.2f}x", f"{ratio.low:.2f}–{ratio.high:.2f}{verdict}"]
    return [*cells, f"{gain.ideal:.2f}x", "–" if gain.reached is None else f"{gain.reached:.0%}"]


def gather(names: list[str], device: str, dtype: str) -> list[Contender]:
    """The models by name, on their device; a single pruned folder is compared with its dense base."""
    if len(names) == 1 and (Path(names[0]) / storage.MANIFEST).is_file():
        folder = Path(names[0])
        try:
            base = rebuild(storage.read_manifest(folder)["base"], folder)
        except CorpError as error:
            raise ModelError(
                f"{error}. To time it against another model give both: corp bench DENSE {folder}"
            ) from error
        dense = Contender("dense base", place(base.eval(), device, dtype), {})
        return [dense, _contender(names[0], device, dtype)]
    return [_contender(name, device, dtype) for name in names]


def _contender(name: str, device: str, dtype: str) -> Contender:
    model = load_model(name, None, pretrained=False)
    before = {site.name: site.width for plan in reversed(history(model)) for site in plan.sites}
    return Contender(name, place(model, device, dtype), before)


def explain(contender: Contender, times: timing.Times, gain: timing.Gain) -> list[str]:
    """Why pruning gains less than its MACs suggest: causes visible in shapes and times, each with its remedy."""
    sites = find_sites(contender.model)
    changed = [s for s in sites if s.width < contender.dense_widths.get(s.name, s.width)]
    values = {site.attention: site.width for site in sites.values}
    narrow = [(s, values.get(s.name, contender.dense_widths.get(s.name, s.width))) for s in sites.attention]
    texts = [*_unequal_widths(contender, [pair for pair in narrow if pair[0].width != pair[1]]), *_odd_widths(changed)]
    if timing.launch_bound(times, gain):
        texts.append(
            f"batch 1 is limited by kernel launches, not by arithmetic: MACs fell {gain.ideal:.2f}x, latency "
            f"{gain.latency.value:.2f}x, and a sample takes {1e3 * times.alone:.2f} ms alone but "
            f"{1e3 * times.together:.2f} ms in a batch of {times.batch}; larger batches, torch.compile or CUDA graphs "
            "help there, narrower layers do not"
        )
    return [f"{contender.name}: {text}" for text in texts]


def _unequal_widths(contender: Contender, narrow: list[tuple[AttentionSite, int]]) -> Iterator[str]:
    """How surgery.attention.attend handles values of another width than queries and keys."""
    if not narrow:
        return
    on_cuda = placement(contender.model)[0].type == "cuda"
    does = "the flash kernel needs equal widths, so the slower memory-efficient one runs"
    pads = "the fused kernel needs equal widths, so narrow heads are padded and their product is not cheaper"
    (first, values), *_ = narrow
    yield (
        f"{_some([site for site, _ in narrow])}: q/k of {first.width} beside v of {values}: "
        f"{does if on_cuda else pads}; only the projections are cheaper. Prune with --equal-heads for one width"
    )


def _odd_widths(changed: list[Site]) -> Iterator[str]:
    for kind, (key, tile) in TILES.items():
        if odd := [site for site in changed if site.kind == kind and site.width % tile]:
            fact = f"width {odd[0].width} is not a multiple of {tile}, so kernels run partly filled tiles"
            yield f"{_some(odd)}: {fact}; prune with --round-to {key}={tile}"


def _some(sites: Sequence[Site]) -> str:
    return sites[0].name + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")
