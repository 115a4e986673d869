"""docs/coverage.md: what corp takes of the families that the installed libraries build, found on tiny random models.

python -m scripts.coverage [FAMILY ...]          (with names: print their rows; without: write the page)
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import corp  # isort: skip  # before the libraries: it makes torchvision importable beside a CPU build of torch
import timm
import torch
import torchvision
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from corp.adapters.examples import candidates
from corp.calibration.batches import feed
from corp.io.tables import markdown_table
from corp.sites import Sites
from corp.storage.export.possible import Exports
from corp.surgery.refit.merged import find_merging
from corp.surgery.refit.repair import why_not
from scripts.other_families import Family, other_families, other_libraries

PAGE = Path(__file__).parent.parent / "docs" / "coverage.md"
SECONDS, PARAMETERS = 40, 40e6
EXTRA_SECONDS = 20  # for refit, tokens and exports of one family together
COLUMNS = (
    "family",
    "MLP",
    "Q/K",
    "V/O",
    "tried out",
    "of the parameters",
    "refit",
    "tokens",
    "exports",
    "refused, and why",
)
KINDS = ("mlp", "attn", "vo")
NO_INPUT = "no input"
NAMED: dict[int, tuple[str, ...]] = {  # sizes by the names that configs give them
    32: ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "word_embed_proj_dim", "embedding_size",
         "encoder_hidden_size", "decoder_hidden_size", "image_size"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "d_inner",
         "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "eos_token_id",
        "num_encoder_layers", "num_decoder_layers", "num_experts_per_tok", "num_key_value_heads", "num_kv_heads"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "num_local_experts",
        "decoder_attention_heads", "num_experts", "n_routed_experts", "rotary_dim"),
    8: ("head_dim", "d_kv", "attention_head_size", "kv_channels", "patch_size", "num_mel_bins"),
    64: ("vocab_size", "max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions",
         "type_vocab_size"),
    0: ("pad_token_id",),
    1: ("bos_token_id", "decoder_start_token_id"),
}  # fmt: skip
SIZES = {name: size for size, names in NAMED.items() for name in names}
TIMM = (
    "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224",
    "vit_small_patch14_dinov2", "vit_small_patch16_dinov3", "vit_small_patch16_rope_224", "eva02_tiny_patch14_224",
    "beit_base_patch16_224", "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "hiera_tiny_224",
    "mvitv2_tiny", "pvt_v2_b0", "cait_xxs24_224", "xcit_nano_12_p16_224", "twins_pcpvt_small", "crossvit_tiny_240",
    "visformer_tiny", "levit_128s", "mobilevit_xs", "vit_relpos_small_patch16_224",
    "vit_so150m_patch16_reg4_gap_256", "mixer_s32_224", "gmixer_24_224", "convnext_atto", "maxvit_nano_rw_256",
    "coatnet_nano_rw_224", "naflexvit_base_patch16_gap", "volo_d1_224", "tnt_s_patch16_224",
)  # fmt: skip
TORCHVISION = ("swin_t", "swin_v2_t", "maxvit_t", "convnext_tiny")


def tiny(config: Any, depth: int = 0) -> dict[str, Any]:
    """The arguments that make a config of the same class small."""
    changes: dict[str, Any] = {}
    for key, value in vars(config).items():
        if key.startswith("_"):
            continue
        if hasattr(value, "to_dict") and depth < 3:
            changes[key] = tiny(value, depth + 1)
        elif key in SIZES and ((isinstance(value, int) and not isinstance(value, bool)) or key.endswith("token_id")):
            changes[key] = SIZES[key]
    return changes


def of_transformers(family: str) -> nn.Module:
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[family])
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family) or MODEL_MAPPING_NAMES[family]
    name = name if isinstance(name, str) else name[0]
    made: nn.Module = getattr(transformers, name)(config_class(**tiny(config_class())))
    return made


def families() -> Iterator[Family]:
    for name in sorted(set(MODEL_MAPPING_NAMES) | set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        if name in CONFIG_MAPPING_NAMES:
            yield Family("transformers", name, partial(of_transformers, name))
    for name in TIMM:
        yield Family("timm", name, partial(timm.create_model, name))
    yield Family("torchvision", "vit", lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48))
    for name in TORCHVISION:
        yield Family("torchvision", name, partial(torchvision.models.get_model, name))
    yield from other_families()


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def by_position(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model(*inputs)


def examined(family: Family) -> tuple[nn.Module, Sites] | str:
    """A model of a family and its sites; a reason where it cannot be built small, or has no Transformer block."""
    torch.manual_seed(0)
    try:
        with at_most(SECONDS):
            model = family.make().eval()
            if sum(p.numel() for p in model.parameters()) > PARAMETERS:
                return "not built: its config does not shrink by the usual names"
    except Exception as error:
        return f"not built: {type(error).__name__} from its small config"
    try:
        with at_most(SECONDS):
            if family.inputs is not None:
                return model, corp.find_sites(model, family.inputs, forward=by_position)
            return model, corp.find_sites(model)
    except Exception as error:
        return f"no site: {str(error)[:120]}"


def batch_of(model: nn.Module) -> Any:
    """The first small batch made from the model that it takes; None where there is none."""
    for batch in candidates(model):
        try:
            with torch.no_grad():
                feed(model, batch)
        except Exception:  # made for another model
            continue
        return batch
    return None


def extras(model: nn.Module, found: Sites, inputs: tuple[Any, ...] | None) -> tuple[str, str, str]:
    """Whether the model is refitted, merges tokens, and where it can be exported to: a tick, or the reason."""
    batch, forward = (batch_of(model), None) if inputs is None else (inputs, by_position)
    some = next((kind for kind in KINDS if any(site.kind == kind for site in found)), None)
    if some is None:
        return "", "", ""
    recipe = corp.Recipe(**{some: 0.5}, skip=tuple(r.name for r in found.refused if r.kind == some))  # type: ignore[arg-type]
    if batch is None:
        return NO_INPUT, NO_INPUT, exported(model, found, recipe)
    return (
        told(lambda: why_not(model, found, recipe, [batch], forward)[1]),
        told(lambda: find_merging(model, found, batch, forward) and ""),
        exported(model, found, recipe),
    )


def told(attempt: Callable[[], str]) -> str:
    """A tick, or why not."""
    try:
        reason = attempt()
    except Exception as error:
        reason = str(error) or type(error).__name__
    return short(reason) if reason else "✓"


def exported(model: nn.Module, found: Sites, recipe: corp.Recipe) -> str:
    """The targets that take the model, pruned by the recipe with one width for all layers."""
    try:
        reasons = Exports(model, found).under(recipe)
    except Exception as error:
        return short(str(error) or type(error).__name__)
    possible = [target for target, reason in reasons.items() if reason is None]
    return f"✓ {', '.join(possible)}" if possible else short(next(iter(reasons.values())) or "")


def short(reason: str) -> str:
    """The first clause of a reason."""
    first = reason.partition(";")[0].partition(". ")[0]
    return first if len(first) <= 100 else first[:97] + "…"


def unrecognised(found: Sites, kind: str) -> bool:
    """Whether layers that are called after an MLP or an attention were recognised as neither."""
    words = ("mlp", "ffn", "feed_forward", "expert") if kind == "mlp" else ("attn", "attention")
    lost = [layer.name.lower() for layer in found.layers if layer.reason.endswith("that was recognised")]
    return any(word in name for name in lost for word in words)


def row(family: Family, made: tuple[nn.Module, Sites] | str) -> tuple[str, ...]:
    if isinstance(made, str):
        return family.name, *[""] * (len(COLUMNS) - 2), made
    model, found = made
    try:
        with at_most(EXTRA_SECONDS):
            more = extras(model, found, family.inputs)
    except TimeoutError:
        more = ("not tried in time",) * 3
    counts = {kind: sum(site.kind == kind for site in found) for kind in KINDS}
    refused = {kind: sum(r.kind == kind for r in found.refused) for kind in KINDS}
    cells = [
        "" if not counts[kind] + refused[kind] else f"{'✓' if counts[kind] else '–'} {counts[kind]}"
        + (f" of {counts[kind] + refused[kind]}" if refused[kind] else "")
        for kind in KINDS
    ]  # fmt: skip
    reasons = {r.reason.partition(";")[0].partition(" (by")[0]: r.kind for r in found.refused}
    why = "; ".join(f"{kind}: {reason}" for reason, kind in list(reasons.items())[:3])
    return family.name, *cells, f"{len(found.proven)} of {len(found)}", f"{found.coverage()['pruned']:.0%}", *more, why


def page(rows: dict[str, list[tuple[str, ...]]], taken: dict[str, tuple[int, int]]) -> str:
    libraries = (torch, transformers, timm, torchvision, *other_libraries())
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in libraries)
    lines = [
        "# What corp takes",
        "",
        "This page is made by `python -m scripts.coverage`: every family that the installed libraries build from a",
        f"small config ({versions}), with random weights.",
        "A ✓ is a kind of site that was found, with the number of them; “tried out” counts the sites whose symmetry",
        "was tested on the model itself (see [models.md](models.md)): the others were reached by no input that could",
        "be made from the config, and are claims until a batch is given. What is refused is refused by name.",
        "“Refit” and “tokens” say whether the model can be refitted and can merge tokens (or why not), found with the",
        "same small input and therefore only where the whole model takes one; “exports” are the targets of",
        "`corp export` that hold the model with half of its hidden channels in every layer.",
        "",
    ]
    lines += [
        f"- {kind}: taken in {got} of {of} families that have it ({got / max(1, of):.0%})"
        for kind, (got, of) in taken.items()
    ]
    for library, its in rows.items():
        lines += ["", f"## {library}", "", markdown_table(COLUMNS, its)]
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: dict[str, list[tuple[str, ...]]] = {}
    taken = {"MLP": [0, 0], "Q/K": [0, 0], "V/O": [0, 0]}
    wanted = sys.argv[1:]
    for family in families():
        if wanted and family.name not in wanted:
            continue
        made = examined(family)
        rows.setdefault(family.library, []).append(row(family, made))
        print(*rows[family.library][-1], sep=" | ", flush=True)
        if not isinstance(made, str):
            found = made[1]
            for name, kind in zip(taken, KINDS, strict=True):
                got = any(site.kind == kind for site in found)
                taken[name][0] += got
                taken[name][1] += got or any(r.kind == kind for r in found.refused) or unrecognised(found, kind)
    if not wanted:
        PAGE.write_text(page(rows, {name: (got, of) for name, (got, of) in taken.items()}), encoding="utf-8")


if __name__ == "__main__":
    main()
