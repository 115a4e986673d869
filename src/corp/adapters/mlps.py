"""MLPs found by structure: linear layers that are up (one, two or packed) and down in one module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from corp.adapters.linears import in_block, in_features, is_channelwise, is_linear, linears, not_linear, out_features
from corp.calibration.hooks import modules_around
from corp.sites import MLPSite, Refusal, Rows, is_pointwise
from corp.surgery.experts import Experts, expert_sites, why_packed

_DOWN = re.compile(r"(?:fc2|fc_2|w2|wo|down|down_proj|c_proj|lin2|linear2|linear_2|fc_out|proj_out|output|"
                   r"dense_4h_to_h|output_dense|output_linear|out_proj|wo_proj|dense_2|proj|output_layer|linear_out)"
                   r"(?:\.0|\.dense|\.linear)?$")  # fmt: skip


def per_channel(model: nn.Module, home: str, ups: tuple[str, ...], down: str) -> list[str]:
    """Modules that have a parameter for every hidden channel (norms, convolutions), registered among the layers.

    In a module that is only an MLP, they may be registered anywhere.
    """
    widths = {in_features(model.get_submodule(down)), out_features(model.get_submodule(ups[0]))}
    order = list(model.get_submodule(home).named_modules(prefix=home))
    names = [name for name, _ in order]
    if not _is_small(model.get_submodule(home)):
        order = order[min(map(names.index, ups)) : names.index(down)]
    return [
        name
        for name, module in order
        if name not in (*ups, down)
        and any(p.numel() in widths or {*p.shape[:1]} & widths for p in module.parameters(recurse=False))
    ]


def experts(model: nn.Module) -> Iterator[MLPSite | Refusal]:
    """Packed experts that were split, and refusals of those that cannot be."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield from expert_sites(name, module)
        elif in_block(f"{name}.x") and (reason := why_packed(module)):
            yield Refusal(name, "mlp", reason)


def mlps(model: nn.Module, taken: set[str], blocks: tuple[str, ...] = ()) -> Iterator[MLPSite | Refusal]:
    """Linear layers that are up (one or two) and down in the smallest module that contains them.

    They are looked for in numbered blocks and under the prefixes `blocks`.
    """
    free = {
        name: layer
        for name, layer in linears(model).items()
        if name not in taken and (name.startswith(blocks) or in_scope(model, name))
    }
    names = sorted((name for name, _ in model.named_modules()), key=lambda n: -n.count(".") - bool(n))
    sites: set[str] = set()
    for home in names:
        prefix = f"{home}." if home else ""
        near = [n for n in free if n.startswith(prefix) and n.count(".") - prefix.count(".") <= 1]
        while (found := _match({n: free[n] for n in near if n in free})) is not None:
            ups, down = found
            for name in (*ups, down):
                del free[name]
            site = _site_name(model, home, down, sites)
            sites.add(site)
            yield _around(model, _mlp(model, site, ups, down), per_channel(model, home, ups, down))


def _around(model: nn.Module, made: MLPSite | Refusal, between: list[str]) -> MLPSite | Refusal:
    """The MLP with the modules between its layers, if all of them treat channels separately."""
    if isinstance(made, Refusal):
        return made
    odd = [name for name in between if not is_channelwise(model.get_submodule(name), made.width)]
    if odd:
        inside = odd[0].removeprefix(f"{made.name}.")
        return Refusal(made.name, "mlp", f"{inside} has parameters of its own for every hidden channel")
    return replace(made, between=tuple(between))


def in_scope(model: nn.Module, name: str) -> bool:
    """Whether a layer is in a repeated block, or in a module of a class that occurs in one (a pooling head's MLP)."""
    if in_block(name):
        return True
    parent = name.rpartition(".")[0]
    if not parent:
        return False
    cls = type(model.get_submodule(parent))
    return cls.__name__.lower().endswith(("mlp", "ffn", "feedforward")) and any(
        type(module) is cls and in_block(f"{other}.x") for other, module in model.named_modules()
    )


def _match(here: dict[str, nn.Module]) -> tuple[tuple[str, ...], str] | None:
    """(ups, down) among the layers of a module, found by the names of second layers, otherwise by their order.

    The order decides if the first layer has the name of a second (`net.0.proj` before `net.2`).
    """
    for one_kind in (is_linear, is_pointwise):
        layers = {name: layer for name, layer in here.items() if one_kind(layer)}
        last = [name for name in layers if _DOWN.match(_tail(name))]
        if (found := _fitting(layers, last) or (_fitting(layers, []) if last else None)) is not None:
            return found
    return None


def _fitting(here: dict[str, nn.Module], last: list[str]) -> tuple[tuple[str, ...], str] | None:
    """(ups, down) by their shapes; layers in `last` cannot be ups."""
    if len(here) < 2:
        return None
    names = list(here)
    order = last + [n for n in reversed(names) if n not in last]
    for down in order:
        hidden, width = in_features(here[down]), out_features(here[down])
        others = [n for n in names if n != down and n not in last and in_features(here[n]) == width]
        if down not in last:
            others = [n for n in others if names.index(n) < names.index(down)]
        if hidden == width and down not in last:
            continue  # the shapes do not distinguish the second from the first
        if hidden < width and is_pointwise(here[down]):
            continue  # the bottleneck of a residual network, or squeeze-and-excitation
        ups = [n for n in others if out_features(here[n]) == hidden]
        packed = [n for n in others if out_features(here[n]) == 2 * hidden]
        if len(ups) in (1, 2):
            return tuple(ups), down
        if len(packed) == 1:
            return tuple(packed), down
        before = [n for n in ups if names.index(n) < names.index(down)]
        if len(before) > 2:
            return (before[-1],), down
    return None


def _tail(name: str) -> str:
    """The last parts of a layer's name, which identify it: `output.dense`, `fc2`."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1] in ("dense", "linear", "0") and len(parts) > 1 else parts[-1]


def _site_name(model: nn.Module, home: str, down: str, known: set[str]) -> str:
    """The site's name: the MLP's module; `mlp` in the block if that is the whole block; the layer if it has several."""
    block = not home or home.rpartition(".")[2].isdigit()
    name = (f"{home}.mlp" if home else "mlp") if block and not _is_small(model.get_submodule(home)) else home
    return down if name in known or (block and name != home and hasattr(model.get_submodule(home), "mlp")) else name


def _is_small(module: nn.Module) -> bool:
    """Whether a module is only an MLP (an expert), not a whole block: two or three linear layers and no norm."""
    return len(linears(module)) <= 3


def _mlp(model: nn.Module, name: str, ups: tuple[str, ...], down: str) -> MLPSite | Refusal:
    for layer in (*ups, down):
        if problem := not_linear(model.get_submodule(layer)):
            return Refusal(name, "mlp", f"{layer.rpartition('.')[2]} {problem}")
    if _chunked(model, down):
        return Refusal(name, "mlp", "it runs over pieces of the sequence; set config.chunk_size_feed_forward = 0")
    width = in_features(model.get_submodule(down))
    rows = tuple(
        Rows(up, start, start + width) for up in ups for start in range(0, out_features(model.get_submodule(up)), width)
    )
    return MLPSite(name, rows, down)


def packings(site: MLPSite) -> tuple[MLPSite, ...]:
    """The site; and, if one layer makes gate and up one after the other, also the site with both interleaved."""
    first, last = site.up[0], site.up[-1]
    if len(site.up) != 2 or first.module != last.module or first.period or last.start != first.stop:
        return (site,)
    turns = tuple(Rows(first.module, i, i + 1, runs=site.width, period=2) for i in (0, 1))
    return site, replace(site, up=turns)


def _chunked(model: nn.Module, layer: str) -> bool:
    around = map(model.get_submodule, modules_around(layer))
    return any(getattr(module, "chunk_size_feed_forward", 0) for module in around)
