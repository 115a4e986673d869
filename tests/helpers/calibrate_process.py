"""A calibration in a process of its own, for the tests that kill it: python -m tests.helpers.calibrate_process"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import corp
from corp import CorpError
from corp.calibration import workers
from corp.calibration.settings import Settings
from tests.helpers.plain import build, sequences

torch.set_num_threads(1)


class Data:
    """Batches, slowly if asked; a worker that is asked to fail has bad ones, and one that is to be killed a few."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        batches = args.batches
        self.parts, self.pause = sequences(batches, 10, precision(args)), args.pause
        self.fail, self.killed, self.wait_for = rank == args.fail_on, rank == args.kill_on, args.wait_for
        self.samples = 10 * batches

    def __iter__(self) -> Iterator[Tensor]:
        for index, part in enumerate(self.parts):  # the first batch is also read before the run takes its folder
            time.sleep(self.pause)
            if self.killed and index > len(self.parts) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            while index > 0 and self.wait_for and not Path(self.wait_for).exists():
                time.sleep(0.05)
            yield torch.full_like(part, float("nan")) if self.fail else part


def precision(args: argparse.Namespace) -> torch.dtype:
    return torch.float32 if args.single else torch.float64


def parsed(options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--wait-for", default="")
    parser.add_argument("--fail-on", type=int, default=-1)
    parser.add_argument("--kill-on", type=int, default=-1)
    parser.add_argument("--single", action="store_true", help="float32 instead of float64")
    return parser.parse_args(options)


def main(options: list[str]) -> None:
    args = parsed(options)
    with workers.launched() as group:
        often = Settings(checkpoint_seconds=0)
        corp.calibrate(build(precision(args)), Data(args, group.rank), out=args.out, settings=often)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CorpError as error:
        sys.exit(f"error: {error}")
