"""Stored block outputs: up to the block that a trial changes, its outputs are the dense model's.

The outputs of the dense model's blocks are kept for a few batches, and a trial's earlier blocks return them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from corp.calibration.hooks import block_of, removing
from corp.calibration.threads import here
from corp.measure.closeness import Reference
from corp.sites import Site, Sites
from corp.surgery.refit.replay import blocks_of, inside
from corp.surgery.stand_in import replace_block

KEPT = 1 << 30  # the most bytes of outputs to keep; later blocks run again


@dataclass
class KnownBlocks:
    """The outputs of a model's blocks on the batches of a reference, batch by batch."""

    outputs: dict[str, list[Any]] = field(default_factory=dict)
    before: dict[str, frozenset[str]] = field(default_factory=dict)  # blocks that had ended when this one began

    @classmethod
    def of(cls, model: nn.Module, sites: Sites, reference: Reference) -> KnownBlocks:
        """Run the model on the reference's batches and keep the outputs of blocks that run once per batch."""
        known, runs, size, ended = cls(), Counter[str](), 0, set[str]()

        def start(name: str) -> None:
            known.before[name] = known.before.get(name, frozenset(ended)) & ended

        def end(name: str, output: Any) -> None:
            nonlocal size
            ended.add(name)
            runs[name] += 1
            size += sum(x.numel() * x.element_size() for x in tree_leaves(output) if isinstance(x, Tensor))
            if size <= KEPT:
                known.outputs.setdefault(name, []).append(_copied(output))

        handles = []
        for name in blocks_of(list(sites)):
            block = model.get_submodule(name)
            handles.append(block.register_forward_pre_hook(here(lambda _m, _args, name=name: start(name))))
            after = here(lambda _m, _args, output, name=name: end(name, output))
            handles.append(block.register_forward_hook(after, prepend=True))  # other hooks run on stored outputs, too
        with removing(handles):
            for batch in reference.batches:
                ended.clear()
                reference.run(model, batch)
        once = {name for name in runs if runs[name] == len(known.outputs.get(name, ())) == len(reference.batches)}
        known.outputs = {name: known.outputs[name] for name in once}
        return known

    def skip(self, trial: nn.Module, changed: Site) -> nn.Module:
        """Make the trial's blocks before the one with the changed site return their stored outputs, in place."""
        for name in self.before.get(block_of(inside(changed)) or "", frozenset()) & set(self.outputs):
            replace_block(trial, name, _returning(self.outputs[name]))
        return trial


def _returning(outputs: Iterable[Any]) -> Callable[..., Any]:
    """A function that returns the next output whatever it is called with; blocks may add to it in place."""
    left = iter(outputs)
    return lambda *_args, **_kwargs: _copied(next(left))


def _copied(output: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, output)
