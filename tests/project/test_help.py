"""``--help`` of every command shows every option: its name, its text and its default, however wide."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer.core
import typer.main

import vtune_cli


def commands(command: Any, name: str = "vtune") -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {word}")


COMMANDS = dict(commands(typer.main.get_command(vtune_cli.app)))


def without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_with_its_text_and_default(name: str, width: int) -> None:
    command = COMMANDS[name]
    context = typer.Context(command, info_name=name, terminal_width=width, max_content_width=width)
    shown = command.get_help(context)
    words = without_space(shown)
    for option in command.params:
        if getattr(option, "hidden", False):
            continue
        text = getattr(option, "help", None) or ""
        assert without_space(text) in words, f"{option.name}: {text}"
        if isinstance(option, typer.core.TyperOption):
            assert all(re.search(rf"(?<![\w-]){flag}(?![\w-])", shown) for flag in option.opts)
            if option.default not in (None, "") and not option.is_flag and not option.required:
                value = ", ".join(option.default) if isinstance(option.default, list) else option.default
                assert f"[default:{without_space(str(getattr(value, 'value', value)))}" in words


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_one_line_that_can_be_copied(name: str) -> None:
    context = typer.Context(COMMANDS[name], info_name=name, terminal_width=80, max_content_width=80)
    lines = COMMANDS[name].get_help(context).splitlines()
    examples = [line for line in lines if re.match(r"(    |  Example: )vtune ", line)]
    assert examples or getattr(COMMANDS[name], "commands", None)
    for line in examples:
        assert line.count('"') % 2 == line.count("'") % 2 == 0
        assert not line.endswith("-")
