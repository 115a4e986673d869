"""Write the hashes of everything that constraints.txt pins: python -m scripts.lock [--check]

pip resolves the development set for this platform without installing it, and reports what it would take and the
sha256 of each file. The result goes to constraints-hashed.txt, for `make LOCKED=1`: an archive that was changed on its
way is then refused. With --check nothing is written: differences from the file, and pins without a hash, are errors.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PINS, LOCKED = ROOT / "constraints.txt", ROOT / "constraints-hashed.txt"
HEADER = "# Made by scripts/lock.py from constraints.txt, for {platform}. Use: make LOCKED=1\n"


def resolved() -> list[dict[str, Any]]:
    """What pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "--constraint", str(PINS), f"{ROOT}[dev]"]
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return [item for item in found if "archive_info" in item["download_info"]]


def locked(items: list[dict[str, Any]]) -> str:
    """A requirements file with one hash per package."""
    lines = []
    for item in items:
        name, version = canonical(item["metadata"]["name"]), item["metadata"]["version"]
        lines.append(f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}\n")
    platform = f"CPython {sys.version_info.major}.{sys.version_info.minor} on {sys.platform}"
    return HEADER.format(platform=platform) + "".join(sorted(lines))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Names and versions of a requirements or constraints file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", text, re.MULTILINE)
    return {canonical(name): version.partition("+")[0] for name, version in found}


def problems(constraints: str, hashed: str) -> list[str]:
    """Where the two files disagree; what only some platforms need may be pinned without a hash."""
    wanted, have = pins(constraints), pins(hashed)
    odd = [f"{name}: {version} has a hash, {wanted.get(name)} is pinned" for name, version in have.items()]
    return [text for (name, version), text in zip(have.items(), odd, strict=True) if wanted.get(name) != version]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the two files, without pip or network")
    args = parser.parse_args()
    if not args.check:
        LOCKED.write_text(locked(resolved()), encoding="utf-8")
    odd = problems(PINS.read_text(encoding="utf-8"), LOCKED.read_text(encoding="utf-8"))
    if odd:
        sys.exit("\n".join([*odd, "run python -m scripts.lock"]))


if __name__ == "__main__":
    main()
