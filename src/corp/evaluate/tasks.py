"""Benchmarks of lm-eval (EleutherAI's harness) on a model that is in memory: nothing is saved or loaded for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from corp.errors import CorpError, DataError


def require() -> None:
    """Fail now, not after the models were loaded."""
    try:
        import lm_eval as _  # noqa: F401
    except ModuleNotFoundError:
        raise CorpError("tasks are run by lm-eval, which is not installed; pip install lm-eval") from None


def run_tasks(
    model: nn.Module, tokenizer: Any, tasks: Sequence[str], *, batch_size: int = 8, limit: int | None = None
) -> dict[str, dict[str, float]]:
    """Per task, its metrics: {"hellaswag": {"acc": 0.4, "acc_stderr": 0.005, …}}.

    A task is a name that lm-eval knows, or a .yaml file in its format, for data of one's own.
    """
    require()
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found = lm_eval.simple_evaluate(model=wrapped, tasks=[_task(name) for name in tasks], limit=limit)
    except (KeyError, ValueError, OSError) as error:  # what it raises for names that it does not know
        raise DataError(f"lm-eval cannot run {', '.join(tasks)}: {error}") from error
    return {task: _metrics(entry) for task, entry in found["results"].items()}


def _task(name: str) -> str | dict[str, Any]:
    if not name.endswith((".yaml", ".yml")):
        return name
    import yaml

    try:
        content = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise DataError(f"{name} is not YAML: {error}") from error
    if not isinstance(content, dict) or "task" not in content:
        raise DataError(f"{name} defines no task of lm-eval: it has no entry 'task'")
    return content


def _metrics(entry: dict[str, Any]) -> dict[str, float]:
    """Names without the filter that lm-eval appends ("acc,none"); what is not a number is left out."""
    return {
        name.partition(",")[0]: float(value)
        for name, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
