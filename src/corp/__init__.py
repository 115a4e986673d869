"""corp: pretrained Transformers made smaller and faster, in closed form, without training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from corp.adapters import torchvision_import

__version__ = "0.2.0"

torchvision_import.watch()  # before anything imports timm or torchvision, including the user's own code

if TYPE_CHECKING:
    from corp.adapters.registry import find_sites as find_sites
    from corp.adapters.registry import register_adapter as register_adapter
    from corp.api import apply as apply
    from corp.api import calibrate as calibrate
    from corp.api import plan as plan
    from corp.api import prune as prune
    from corp.api import repair as repair
    from corp.calibration.settings import Settings as Settings
    from corp.calibration.statistics import Statistics as Statistics
    from corp.errors import CorpError as CorpError
    from corp.evaluate.shift import measure_shift as measure_shift
    from corp.io.observer import Observer as Observer
    from corp.planning.plan import Plan as Plan
    from corp.recipe import Recipe as Recipe
    from corp.steps.result import Result as Result
    from corp.storage.folder import load as load
    from corp.storage.folder import save as save
    from corp.storage.streamed.prune import prune_streamed as prune_streamed

# Each public name and the module that it comes from. A module is imported when its name is first used, so that
# `corp --help` does not wait for torch.
_PUBLIC = {
    "CorpError": "errors",
    "Observer": "io.observer",
    "Plan": "planning.plan",
    "Recipe": "recipe",
    "Result": "steps.result",
    "Settings": "calibration.settings",
    "Statistics": "calibration.statistics",
    "apply": "api",
    "calibrate": "api",
    "find_sites": "adapters.registry",
    "load": "storage.folder",
    "measure_shift": "evaluate.shift",
    "plan": "api",
    "prune": "api",
    "prune_streamed": "storage.streamed.prune",
    "register_adapter": "adapters.registry",
    "repair": "api",
    "save": "storage.folder",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'corp' has no attribute {name!r}")
    return getattr(import_module(f"corp.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
