"""Lookup of models by folder or hub id within two seconds; the hub's own client would try six times.

Nothing heavy is imported here, so that a mistyped name is reported before torch is loaded.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from corp.adapters.near_names import beside, did_you_mean
from corp.errors import ModelError

SECONDS = 1.2
ENDPOINT = "https://huggingface.co"


def endpoint() -> str:
    """The address of the Hugging Face hub, or of the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT") or ENDPOINT


def reachable(url: str) -> bool:
    """Whether the host of `url`, or the proxy in front of it, accepts a connection soon enough."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    place = urlsplit(getproxies().get(urlsplit(url).scheme) or url)
    answers: list[bool] = []
    # A thread, because a name lookup has no time limit.
    probe = Thread(target=_connect, args=(place.hostname or "", place.port or 443, answers), daemon=True)
    probe.start()
    probe.join(SECONDS)
    return bool(answers)


def _connect(host: str, port: int, answers: list[bool]) -> None:
    try:
        socket.create_connection((host, port), timeout=SECONDS).close()
    except (OSError, UnicodeError):
        return
    answers.append(True)


def is_path(name: str) -> bool:
    """Whether a name denotes a folder; hub ids are "name" or "owner/name", and never begin like a path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()


def cached(name: str) -> bool:
    """Whether any file of the hub model `name` was downloaded before."""
    return (_cache() / f"models--{name.replace('/', '--')}").is_dir()


def _cache() -> Path:
    """Where the hub's client keeps its downloads."""
    there = os.environ.get
    home = there("HF_HOME") or Path(there("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(there("HF_HUB_CACHE") or there("HUGGINGFACE_HUB_CACHE") or Path(home, "hub")).expanduser()


def require_known(name: str) -> None:
    """Refuse a name that is neither a folder nor a downloaded hub model, if the hub cannot be reached."""
    if is_path(name):
        if not Path(name).expanduser().is_dir():
            raise ModelError(
                f"there is no folder {name}; hf: takes a folder for from_pretrained, or a hub id like owner/name"
                f"{_did_you_mean(name)}"
            )
    elif not cached(name) and not reachable(endpoint()):
        raise missing(name)


def require_weights(name: str, cached: bool) -> None:
    """Refuse the pretrained weights of a timm model that are neither `cached` nor reachable."""
    if not cached and not reachable(endpoint()):
        raise ModelError(
            f"the pretrained weights of {name} are not on this machine, and {endpoint()} cannot be reached; "
            "pass the weights as a file: weights=FILE"
        )


def any_cached(part: str) -> bool:
    """Whether a hub model with `part` in its name was downloaded before."""
    return any(_cache().glob(f"models--*{part}*"))


def missing(name: str) -> ModelError:
    return ModelError(
        f"there is no folder {name}, no downloaded hub model of that name, and the hub cannot be reached"
        f"{_did_you_mean(name)}"
    )


def _did_you_mean(name: str) -> str:
    """A suggestion of folders with similar names beside the missing one."""
    return did_you_mean(f"hf:{path}" for path in beside(Path(name)) if path.is_dir())
