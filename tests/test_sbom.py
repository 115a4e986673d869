"""The bill of materials names everything that is installed with corp, and where its parts lead."""

from __future__ import annotations

from importlib import metadata

import pytest

from scripts.sbom import NAME, UNKNOWN, bill


@pytest.fixture(scope="module")
def made() -> dict:
    try:
        metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        pytest.skip("corp-prune is on the path but not installed")
    return bill(frozenset({"all"}))


def test_the_bill_lists_what_is_installed_with_its_licence(made: dict) -> None:
    parts = {part["name"]: part for part in made["components"]}
    direct = {"torch", "safetensors", "numpy", "typer", "rich", "jinja2", "timm", "transformers"}
    assert direct <= set(parts)
    assert parts["safetensors"]["version"] == metadata.version("safetensors")
    assert parts["safetensors"]["purl"] == f"pkg:pypi/safetensors@{metadata.version('safetensors')}"
    assert [name for name in direct if parts[name]["licenses"][0]["license"]["name"] == UNKNOWN] == []
    assert "pytest" not in parts  # nobody who installs corp gets it


def test_every_reference_of_the_bill_leads_somewhere(made: dict) -> None:
    known = {made["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in made["components"])}
    assert {entry["ref"] for entry in made["dependencies"]} == known
    assert {target for entry in made["dependencies"] for target in entry["dependsOn"]} <= known
    assert made == bill(frozenset({"all"}))
