"""Pages name places that exist; ARCHITECTURE.md names every wing, on the floor where it stands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pages import PAGES, ROOT

PACKAGES = ("servers", "engine", "loadgen", "doctor", "tuner")
FOLDERS = "|".join((*PACKAGES, "playbooks", "benchmarks", "tests", "docs"))
PLACE = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*]/?")
MODULE = re.compile(rf"(?<=-m )(?:{FOLDERS})(?:\.\w+)+")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
TODAY = [page for page in PAGES if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    made = set(re.findall(r"^```\w+ (\S+)$", text, re.M))  # by the page's worked example
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    places = {place for place in PLACE.findall(prose) if not re.search(r"[A-Z]{2}", place.rpartition("/")[2])}
    modules = {module.replace(".", "/") for module in MODULE.findall(text)}
    gone = [place for place in places - made if not any(ROOT.glob(place))]
    gone += [name for name in modules if not ((ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file())]
    assert not gone, "does not exist"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_wing_stands_on_its_floor(package: str) -> None:
    layers = next(c["layers"] for c in CONTRACTS if c.get("containers") == [package])
    contract = [sorted(layer.split(" | ")) for layer in reversed(layers)]
    (section,) = re.findall(
        rf"^## `{package}/`.*?(?=^## )", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S
    )
    floors: dict[int, list[str]] = {}
    for floor, name in re.findall(r"^\| (\d+) \| `(\w+)(?:/|\.py)` \|", section, re.M):
        floors.setdefault(int(floor), []).append(name)
    assert [sorted(names) for _, names in sorted(floors.items())] == contract, (
        "its table in ARCHITECTURE.md has other floors than the layers in pyproject.toml"
    )
    for name in re.findall(r"^\| \d+ \| `([\w./]+)` \|", section, re.M):
        assert (ROOT / package / name).exists(), name
