"""Hundreds of faults and thousands of damaged files: python -m scripts.soak [--faults N] [--cases N] [--seed N]

Prints what it does and writes counts to soak.json; exits with 1 if any promise of docs/reliability.md was not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import corp
from corp.io.files import write_text
from tests.helpers.faults import COMMANDS, FAULTS, BrokenError, Workshop, applies, attempt, can_mount
from tests.helpers.fuzz import TARGETS

SLOW = {"saved timm model": 0.05, "statistics": 0.25}  # of --cases


def soak_faults(total: int, seed: int, commands: list[str]) -> dict[str, Any]:
    """`total` faults, dealt out evenly to these commands."""
    folder = Path(tempfile.mkdtemp(prefix="corp-soak-"))
    shop = Workshop(folder)
    pairs = [(fault, command) for fault in FAULTS for command in commands if applies(fault, command)]
    if not can_mount(folder / "mounted"):
        print("no file system can be mounted here: full disks are left to the file size limit", flush=True)
        pairs = [pair for pair in pairs if pair[0] != "full disk"]
    outcomes: dict[str, Counter[str]] = {fault: Counter() for fault, _ in pairs}
    broken: list[str] = []
    rounds = (pair for number in count(seed) for pair in ((*p, number) for p in pairs))
    for done, (fault, command, number) in zip(range(1, total + 1), rounds, strict=False):
        try:
            outcome = attempt(shop, fault, command, number)
        except BrokenError as error:
            outcome = "broken"
            broken.append(f"{fault}, {command}, {number}: {error}")
            print(f"BROKEN {broken[-1]}", flush=True)
        outcomes[fault][outcome] += 1
        if done % 20 == 0:
            print(f"{done} of {total} faults, {len(broken)} broken promises", flush=True)
    shop.close()
    shutil.rmtree(folder, ignore_errors=True)
    return {"faults": total, "outcomes": outcomes, "broken": broken}


def soak_files(cases: int) -> dict[str, Any]:
    """Damaged files, each target in a process of its own."""
    counts, broken = [], []
    for name in TARGETS:
        number = max(1, int(cases * SLOW.get(name, 1)))
        done = subprocess.run(
            [sys.executable, "-m", "tests.helpers.fuzz", str(number), name], capture_output=True, text=True, check=False
        )
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # libraries print, too
        counts += [line for line in told if "cases" in line]
        broken += [json.dumps(line) for line in told if "cases" not in line]
        if done.returncode not in (0, 1) or not told:
            broken.append(f"{name}: the process ended with {done.returncode}: {done.stderr[-1000:]}")
        print(name, told[-1] if told else done.stderr[-1000:], flush=True)
    return {"files": counts, "broken": broken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=400)
    parser.add_argument("--cases", type=int, default=2000, help="damaged files per kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("soak.json"))
    parser.add_argument("--commands", nargs="*", choices=list(COMMANDS), default=list(COMMANDS))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.monotonic()
    faults = soak_faults(args.faults, args.seed, args.commands) if args.faults else {"broken": []}
    files = soak_files(args.cases) if args.cases else {"broken": []}
    minutes = round((time.monotonic() - start) / 60, 1)
    content = {"corp": corp.__version__, "seed": args.seed, "minutes": minutes, "faults": faults, "files": files}
    write_text(args.out, json.dumps(content, indent=1) + "\n")
    broken = [*faults["broken"], *files["broken"]]
    print(f"{len(broken)} broken promises in {minutes} minutes; counts in {args.out}")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
