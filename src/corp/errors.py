"""The exception classes, and warnings. Every message states the fact, the numbers and the remedy."""

from __future__ import annotations

import sys
import warnings


class CorpError(Exception):
    """Base class of all errors that corp raises on purpose; the subclasses name the step."""


class RecipeError(CorpError, ValueError):
    """The recipe is invalid for any model (checked when it is created)."""


class ModelError(CorpError):
    """The model, or a part of it, cannot be found, built or pruned."""


class DataError(CorpError):
    """The calibration data cannot be read or is not usable."""


class StatisticsError(CorpError):
    """The statistics are unusable, or belong to something else."""


class SingularSystemError(CorpError):
    """A linear system of the method has no stable solution."""


class PlanError(CorpError):
    """The plan does not fit the model or the statistics."""


class StorageError(CorpError):
    """A folder or file cannot be written, or is not what it claims to be."""


class CorpWarning(UserWarning):
    """Something the user should know, although the result is valid."""


def warn(message: str) -> None:
    """Warn that a run deviates from the request; the warning points to the line outside corp that called it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "corp":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CorpWarning, stacklevel=level)


def first_line(error: BaseException) -> str:
    """The first line of another library's error, which may be pages long, or the error's class if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
