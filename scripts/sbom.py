"""Write a CycloneDX bill of materials of corp and all it can be installed with: python -m scripts.sbom OUT.json

Names, versions, licences and hashes come from what is installed and from constraints-hashed.txt: nothing is fetched,
and the same environment gives the same bytes. `--licences` prints the licences as a table instead.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from corp.io.files import write_text
from corp.io.tables import markdown_table

ROOT = Path(__file__).parents[1]
NAME = "corp-prune"
UNKNOWN = "not stated"


def needed(name: str, extras: frozenset[str]) -> Iterator[Requirement]:
    """What a distribution requires here, with these extras."""
    for line in metadata.requires(name) or ():
        wanted = Requirement(line)
        places = [{**default_environment(), "extra": extra} for extra in (extras or {""})]
        if wanted.marker is None or any(wanted.marker.evaluate(place) for place in places):
            yield wanted


def closure(name: str, extras: frozenset[str]) -> dict[str, list[str]]:
    """Every installed distribution that `name` leads to, with what it requires itself."""
    found: dict[str, set[str]] = {}
    todo, seen = [(canonicalize_name(name), extras)], set()
    while todo:
        here, wanted = todo.pop()
        if (here, wanted) in seen or not installed(here):
            continue
        seen.add((here, wanted))
        nearby = found.setdefault(here, set())
        for requirement in needed(here, wanted):
            target = canonicalize_name(requirement.name)
            if installed(target):
                nearby.add(target)
                todo.append((target, frozenset(requirement.extras)))
    return {key: sorted(value - {key}) for key, value in sorted(found.items())}


def installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def licence(name: str) -> str:
    """The licence as the package states it: an SPDX expression, a short field, or classifiers."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    stated = (about.get("License") or "").strip()
    if stated and "\n" not in stated and len(stated) < 60:  # some put the whole text there
        return stated
    marks = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if line.startswith("License ::")]
    return ", ".join(mark for mark in marks if mark != "OSI Approved") or UNKNOWN


def locked_hashes(path: Path) -> dict[str, list[str]]:
    """The sha256 sums of every pinned archive, by name."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8")) if path.is_file() else ():
        if match := re.match(r"([A-Za-z0-9._-]+)==", entry):
            found[canonicalize_name(match[1])] = re.findall(r"sha256:([0-9a-f]{64})", entry)
    return found


def component(name: str, hashes: list[str]) -> dict[str, Any]:
    version = metadata.version(name)
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "licenses": [{"license": {"name": licence(name)}}],
    }
    return made | ({"hashes": [{"alg": "SHA-256", "content": value} for value in hashes]} if hashes else {})


def bill(extras: frozenset[str]) -> dict[str, Any]:
    """The bill of materials as CycloneDX 1.5 has it."""
    graph, hashes = closure(NAME, extras), locked_hashes(ROOT / "constraints-hashed.txt")
    parts = {name: component(name, hashes.get(name, [])) for name in graph}
    me = {**parts.pop(NAME), "type": "application"}
    reference = {NAME: me["bom-ref"], **{name: part["bom-ref"] for name, part in parts.items()}}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": me},
        "components": list(parts.values()),
        "dependencies": [{"ref": reference[n], "dependsOn": [reference[m] for m in near]} for n, near in graph.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=Path("sbom.json"))
    parser.add_argument("--extra", nargs="*", default=["all"], help="extras of corp-prune that are listed too")
    parser.add_argument("--licences", action="store_true")
    args = parser.parse_args()
    made = bill(frozenset(args.extra))
    if args.licences:
        rows = [(p["name"], p["version"], p["licenses"][0]["license"]["name"]) for p in made["components"]]
        sys.stdout.write(markdown_table(("package", "version", "licence"), rows) + "\n")
        return
    write_text(args.out, json.dumps(made, indent=1) + "\n")
    sys.stdout.write(f"{args.out}: {len(made['components'])} packages\n")


if __name__ == "__main__":
    main()
