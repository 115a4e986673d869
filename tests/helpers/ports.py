"""Ports that nobody listens at."""

from __future__ import annotations

import socket


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
