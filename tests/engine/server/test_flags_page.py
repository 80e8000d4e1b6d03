"""The table of flags in docs/engine.md: every flag, its default here and in vLLM, and every difference told.

``vllm_defaults.json`` holds what the argument parser of ``vllm serve`` 0.32.0 has as default (null: none) for
the flags of it that are here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import vtune_cli

PAGE = Path(__file__).parents[3] / "docs" / "engine.md"
ROW = re.compile(r"^\| `--([a-z-]+)` \| (.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
TABLE = {name: (vllm, here, meaning) for name, vllm, here, meaning in ROW.findall(PAGE.read_text())}
VLLM: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_defaults.json").read_text())
FLAGS = {
    next(flag for flag in option.opts if flag.startswith("--"))[2:]: option
    for option in typer.main.get_command(vtune_cli.app).commands["serve"].params  # type: ignore[attr-defined]
    if option.param_type_name == "option"
}


def shown(value: Any) -> str:
    """A default as the table writes it."""
    if isinstance(value, dict):
        return "an object"
    return "–" if value is None else f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def test_every_flag_has_its_row() -> None:
    assert list(TABLE) == list(FLAGS)


@pytest.mark.parametrize("flag", FLAGS)
def test_defaults_are_those_of_the_programs(flag: str) -> None:
    vllm, here, meaning = TABLE[flag]
    assert here == shown(FLAGS[flag].default)
    assert vllm == (shown(VLLM[flag]) if flag in VLLM else "none")
    assert meaning.endswith(".")
    assert vllm == here or not meaning.startswith("The same"), "say what is different"
