"""The names of timm's models, read from its source files, because importing timm takes seconds.

Nothing heavy is imported here, so that a mistyped name is reported before torch is loaded.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from corp.adapters.near_names import MOST, beside, did_you_mean, near
from corp.errors import ModelError

REGISTERED = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)


def on_hub(name: str) -> bool:
    """Whether timm's source says that the pretrained weights of the model are on the Hugging Face hub."""
    entry = re.compile(rf"'{re.escape(name.partition('.')[0])}(\.\w+)?': _cfg\([^)]*hf_hub_id")
    return any(entry.search(text) for text in _sources())


def require_known(name: str) -> None:
    """Refuse a name that does not occur in the source of timm's models, and suggest similar ones."""
    wanted, sources = name.partition(".")[0], _sources()
    whole = re.compile(rf"\b{re.escape(wanted)}\b")  # slow where the word does not occur at all
    if sources and not any(wanted in text and whole.search(text) for text in sources):
        raise unknown(name, [model for text in sources for model in REGISTERED.findall(text)])


def unknown(name: str, known: list[str]) -> ModelError:
    """The error for an unknown name."""
    if Path(name).is_file():
        return ModelError(f"{name} is a file: give the name of its architecture, and the file as weights={name}")
    folders = [path for path in beside(Path(name)) if path.is_dir()]
    names = [*folders, *near(name.partition(".")[0], known)][:MOST]
    hint = did_you_mean(names) or "; timm.list_models() lists all"
    return ModelError(f"timm has no model called {name!r}, and there is no folder of that name{hint}")


def require_weights_file(path: Path) -> None:
    """Refuse a weights file that is missing, or a folder."""
    if path.is_dir():
        raise ModelError(f"{path} is a folder, but weights=FILE takes a file (.safetensors or .pth)")
    if not path.is_file():
        raise ModelError(f"there is no weights file {path}{did_you_mean(beside(path))}")


@cache
def _sources() -> list[str]:
    """The text of every module of timm.models, read once; empty if timm is not installed as files."""
    spec = find_spec("timm")
    folders = [Path(place, "models") for place in (spec.submodule_search_locations if spec else None) or []]
    return [file.read_text(encoding="utf-8") for folder in folders for file in sorted(folder.glob("*.py"))]
