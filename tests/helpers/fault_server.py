"""A process that has imported everything and forks one `corp` per order: python -m tests.helpers.fault_server

Faults are a matter of moments: without the seconds of importing before it, a command can be hit hundreds of times, in
all of its parts. Every order is a line of JSON on stdin; answers are the child's process id, then how it ended. An
order that says "here" is run without a fork, and so imports what its children will need.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from corp.cli.main import app, main

CAPABILITIES_VERSION_3 = 0x20080522


def serve(answers: int) -> dict[str, Any] | None:
    """Answer orders until there are no more; in a child, return its order instead."""

    def say(answer: dict[str, Any]) -> None:
        os.write(answers, json.dumps(answer).encode() + b"\n")

    say({"ready": os.getpid()})
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("here"):
            app(order["args"], standalone_mode=False)
            say({"code": 0})
            continue
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            for end, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out_end, 1), (err_end, 2)):
                os.dup2(end, number)
            for end in (out, out_end, err, err_end, answers):
                os.close(end)
            return dict(order)
        os.close(out_end)
        os.close(err_end)
        say({"pid": child})
        texts = _drained(out, err)
        _, status = os.waitpid(child, 0)
        say({"code": os.waitstatus_to_exitcode(status), "out": texts[out], "err": texts[err]})
    return None


def _drained(*pipes: int) -> dict[int, str]:
    """Everything that comes out of the pipes until all are closed."""
    content = dict.fromkeys(pipes, b"")
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                read = os.read(key.fd, 65536)
                content[key.fd] += read
                if not read:
                    waiting.unregister(key.fd)
                    os.close(key.fd)
    return {pipe: text.decode("utf-8", "replace") for pipe, text in content.items()}


def obey(order: dict[str, Any]) -> None:
    """Be the command of the order, within its limits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order.get("powerless"):
        _give_up_privileges()
    if (size := order.get("file_size")) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    if (more := order.get("memory")) is not None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    sys.argv = ["corp", *order["args"]]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        # Taking apart an interpreter with all of torch in it takes longer than the command.
        os._exit(end.code if isinstance(end.code, int) else 0)


def _give_up_privileges() -> None:
    """Root may write anywhere; without its capabilities it is bound by permissions like anybody."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what commands print here is no answer
    mine = serve(answers)
    if mine is not None:
        obey(mine)
