"""The steps of the contract, run one after the other on one model, and the table of their outcomes."""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from corp import api
from corp.adapters.proof import tensors
from corp.adapters.registry import find_sites, require_module
from corp.calibration.batches import Forward, described, evaluating, feed, require_runs
from corp.errors import CorpError, DataError, ModelError
from corp.evaluate.check import check, require_equal
from corp.io.tables import Tabular
from corp.measure.cost import count_params
from corp.recipe import Recipe
from corp.sites import Sites, fingerprint
from corp.steps.result import Result
from corp.storage.export.possible import Exports
from corp.storage.folder import load, save
from corp.surgery.dispatch import require_weights

KINDS = {"mlp": "MLP", "attn": "Q/K", "vo": "V/O"}
AMOUNT = re.compile(r" \(by \S+ of its size\)")  # of a trial: reasons that differ in it alone are told once
WIDE = 96  # characters of a detail in one line of the table


@dataclass(frozen=True)
class Row:
    """One row of the contract: what was tested, whether it holds, and the numbers or the reason.

    `ran` is False for a step that lacks the result of an earlier one; such a step has not passed.
    """

    name: str
    passed: bool
    detail: str
    ran: bool = True

    @property
    def state(self) -> str:
        return "ok" if self.passed else "FAILED" if self.ran else "not run"


@dataclass(frozen=True, repr=False)
class Contract(Tabular):
    """The outcome of the contract on one model: iterate over it for its rows; it has `passed` if all of them have."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    @property
    def failed(self) -> tuple[Row, ...]:
        """The rows that ran and failed."""
        return tuple(row for row in self.rows if row.ran and not row.passed)

    def table(self) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        broken = ", ".join(row.name for row in self.failed)
        title = "the contract holds" if self.passed else f"the contract does not hold: {broken}"
        return title, ("contract", "", "detail"), [line for row in self.rows for line in _lines(row)]

    def require(self) -> None:
        """Raise an error with the table, unless the contract holds."""
        if not self.passed:
            raise ModelError(str(self))


def _lines(row: Row) -> list[tuple[str, ...]]:
    """A row in as many lines as its detail needs."""
    first, *more = textwrap.wrap(row.detail, WIDE) or [""]
    return [(row.name, row.state, first), *(("", "", line) for line in more)]


def check_model(
    model: nn.Module,
    batch: Any,
    *,
    forward: Forward | None = None,
    sparsity: float = 0.4,
    show: Callable[[str], None] | None = print,
) -> Contract:
    """Run the whole contract on `model` with one batch (or a list of batches) and print a table of the outcome.

    Sites are verified on the model, pruning nothing changes nothing, the predicted error of every site equals the
    measured one, and the pruned model is smaller, finite, can be saved and loaded, can be exported or says why not, and
    can be pruned again. The model itself does not change. The returned object has `passed`, and prints as the table;
    `show=None` prints nothing. A batch that the model does not accept is a DataError.
    """
    batches = batch if isinstance(batch, list) else [batch]
    _require_runs(model, batches, forward)
    work = _Contract(model, batches, forward, sparsity)
    made = Contract(tuple(_tried(name, step) for name, step in work.steps()))
    if show:
        show(str(made))
    return made


def _require_runs(model: nn.Module, batches: Sequence[Any], forward: Forward | None) -> None:
    """Refuse batches that the model does not accept, before anything is tested."""
    require_module(model)
    require_weights(model)
    if not batches:
        raise DataError("check_model needs at least one batch; the list is empty")
    for number, batch in enumerate(batches):
        made = list(tensors(require_runs(model, batch, forward, f"batch {number}")))
        if not made:
            raise DataError(f"the model returns no tensor of real numbers for batch {number} ({described(batch)})")


def _tried(name: str, step: Callable[[], str]) -> Row:
    try:
        return Row(name, True, step())
    except _NotRunError as error:
        return Row(name, False, str(error), ran=False)
    except CorpError as error:
        return Row(name, False, str(error))
    except Exception as error:  # from the model's own code, or a defect here: the table continues
        return Row(name, False, f"{type(error).__name__}: {error}")


class _NotRunError(CorpError):
    """A step that lacks the result of an earlier one."""


class _BrokenError(CorpError):
    """A property that does not hold."""


class _Contract:
    def __init__(self, model: nn.Module, batches: Sequence[Any], forward: Forward | None, sparsity: float) -> None:
        self.model, self.batches, self.forward = model, list(batches), forward
        self.before = fingerprint(model)
        self.sites: Sites | None = None
        self.sparsity = sparsity
        self.result: Result | None = None

    def steps(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("repeatable", self.repeatable),
            *((f"{name} sites", lambda kind=kind: self.found(kind)) for kind, name in KINDS.items()),
            ("accounted for", self.accounted),
            ("something to prune", self.something),
            ("nothing pruned is the identity", self.identity),
            ("predicted = measured", self.predicted),
            ("pruned", self.pruned),
            ("saved and loaded", self.saved),
            ("exports", self.exports),
            ("pruned again", self.again),
            ("left as it was", self.untouched),
        ]

    def repeatable(self) -> str:
        if not _equal(self.outputs(self.model), self.outputs(self.model)):
            raise _BrokenError(
                "the model gives another output for the same batch in eval mode (or one that is not a number), so "
                "nothing can be compared; seed what it draws at random in forward=..."
            )
        return "the same output for the same batch"

    def find(self) -> Sites:
        if self.sites is None:
            self.sites = find_sites(self.model, self.batches[0], self.forward)
        return self.sites

    def found(self, kind: str) -> str:
        sites = [site for site in self.find() if site.kind == kind]
        refused = [r for r in self.find().refused if r.kind == kind]
        proven = sum(site.name in self.find().proven for site in sites)
        reasons = "; ".join({AMOUNT.sub("", r.reason): r.reason for r in reversed(refused)}.values())
        return f"{len(sites)} found, {proven} tried out, {len(refused)} refused{': ' + reasons if reasons else ''}"

    def accounted(self) -> str:
        shares = self.find().coverage()
        return ", ".join(f"{share:.0%} {state}" for state, share in shares.items())

    def something(self) -> str:
        if not len(self.find()):
            raise _BrokenError("nothing in this model can be pruned")
        return f"{len(self.find())} sites"

    def prunable(self) -> Sites:
        """The sites, if there are any."""
        if self.sites is None or not len(self.sites):
            raise _NotRunError("there is nothing to prune")
        return self.sites

    def outputs(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad(), evaluating(model):
            return list(tensors(feed(model, self.batches[0], self.forward)))

    def prune(self, model: nn.Module, recipe: Recipe) -> Result:
        return api.prune(model, self.batches, recipe, forward=self.forward)

    def identity(self) -> str:
        self.prunable()
        same = self.prune(self.model, Recipe())
        if not _equal(self.outputs(same.model), self.outputs(self.model)):
            raise _BrokenError("the outputs differ")
        return "bit-identical"

    def predicted(self) -> str:
        recipe = _recipe(self.prunable(), self.sparsity)
        stats = api.calibrate(self.model, self.batches, forward=self.forward)
        plan = api.plan(self.model, stats, recipe)
        pruned = api.apply(self.model, replace(stats, inputs=None), plan).model
        checked = check(self.model, pruned, plan, self.batches, forward=self.forward)
        require_equal(checked)
        return f"{len(checked)} of {len(plan.sites)} sites measured"

    def pruned(self) -> str:
        self.result = self.prune(self.model, _recipe(self.prunable(), self.sparsity))
        dense, smaller = map(count_params, (self.model, self.result.model))
        if not all(bool(x.isfinite().all()) for x in self.outputs(self.result.model)) or smaller >= dense:
            raise _BrokenError("the pruned model is no smaller, or its output is not finite")
        return f"{smaller / dense:.1%} of the parameters"

    def saved(self) -> str:
        result = self.made()
        with tempfile.TemporaryDirectory() as folder:
            save(result, Path(folder) / "model")
            try:
                loaded, how = load(Path(folder) / "model"), "from the folder alone"
            except CorpError:
                loaded, how = load(Path(folder) / "model", base=self.model), "with base=model"
            if not _equal(self.outputs(loaded), self.outputs(result.model)):
                raise _BrokenError(f"loaded {how}, the outputs differ")
        return f"bit-identical, loaded {how}"

    def exports(self) -> str:
        """Report the possible export targets; every other target must give a reason, and none is required."""
        reasons = Exports(self.model, self.prunable()).of(self.made().plan)
        possible = [target for target, reason in reasons.items() if reason is None]
        return ", ".join(possible) or f"none: {next(iter(reasons.values()), 'its library is not known')}"

    def again(self) -> str:
        once = self.made().model
        sites = find_sites(once, self.batches[0], self.forward)
        if not len(sites):
            return "nothing is left to prune"
        twice = self.prune(once, _recipe(sites, self.sparsity / 2)).model
        if not all(bool(x.isfinite().all()) for x in self.outputs(twice)):
            raise _BrokenError("the output is not finite")
        return ", ".join(name for kind, name in KINDS.items() if any(site.kind == kind for site in sites))

    def made(self) -> Result:
        if self.result is None:
            raise _NotRunError("the model was not pruned")
        return self.result

    def untouched(self) -> str:
        if fingerprint(self.model) != self.before:
            raise _BrokenError("the model's weights have changed")
        hooks = [h for m in self.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        if any(getattr(hook, "__module__", "").startswith("corp.") for hook in hooks):
            raise _BrokenError("hooks are left on the model")
        return "weights bit-identical, no hooks"


def _recipe(sites: Sites, share: float) -> Recipe:
    """A recipe for all kinds of sites that the model has, except those that are refused by name."""
    kinds: dict[str, Any] = {kind: share for kind in KINDS if any(site.kind == kind for site in sites)}
    return Recipe(**kinds, skip=tuple(r.name for r in sites.refused if r.kind in kinds))


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
