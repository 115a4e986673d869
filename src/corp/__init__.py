"""corp: pretrained Transformers made smaller and faster, in closed form, without training."""

from corp._torchvision import make_importable

make_importable()  # before anything imports timm or torchvision, the user's own next line included

from corp.adapters.registry import find_sites, register_adapter  # noqa: E402
from corp.api import Result, apply, calibrate, plan, repair  # noqa: E402
from corp.errors import CorpError  # noqa: E402
from corp.recipe import Recipe  # noqa: E402
from corp.searching import prune  # noqa: E402
from corp.shift import measure_shift  # noqa: E402
from corp.stats import Statistics  # noqa: E402
from corp.storage import load, save  # noqa: E402
from corp.version import __version__  # noqa: E402

__all__ = [
    "CorpError",
    "Recipe",
    "Result",
    "Statistics",
    "__version__",
    "apply",
    "calibrate",
    "find_sites",
    "load",
    "measure_shift",
    "plan",
    "prune",
    "register_adapter",
    "repair",
    "save",
]
