"""Every command is documented, every documented command exists, every help text has an example."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from pages import PAGES

import vtune_cli

TREE: Any = typer.main.get_command(vtune_cli.app)


def _commands(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf command and every group that does something by itself, with its path."""
    children = getattr(node, "commands", {})
    if path and (not children or node.invoke_without_command):
        yield path, node
    for name, child in children.items():
        yield from _commands(child, (*path, name))


COMMANDS = dict(_commands(TREE))


def _options(path: tuple[str, ...]) -> set[str]:
    """Option names accepted along ``path``."""
    node, found = TREE, {"--help"}
    for name in ("", *path):
        node = node.commands[name] if name else node
        for parameter in node.params:
            found.update(parameter.opts)
            found.update(parameter.secondary_opts)
    return found


def _shell_lines() -> Iterator[tuple[str, str]]:
    """``vtune …`` command lines in fenced blocks of the documentation (continuations joined)."""
    for page in PAGES:
        for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page.read_text(), re.M | re.S):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                line = line.removeprefix("$ ")
                if re.match(r"(\S*/)?vtune\s", line):
                    yield page.name, line


LINES = sorted(set(_shell_lines()))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_is_documented(path: tuple[str, ...]) -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert f"vtune {' '.join(path)}" in text, "name it in README.md or docs/"


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_and_says_what_each_option_is_for(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    text = f"{command.help or ''}\n{command.epilog or ''}"
    assert f"vtune {' '.join(path)}" in text, "give an example in the help text"
    unexplained = [p.opts for p in command.params if not getattr(p, "help", None) and p.name != "help"]
    assert not unexplained


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}" for page, line in LINES])
def test_every_documented_command_exists(page: str, line: str) -> None:
    words = shlex.split(line.split(" # ")[0].split(" | ")[0].split(" > ")[0], comments=True)[1:]
    node, path = TREE, []
    while words and words[0] in getattr(node, "commands", {}):
        node = node.commands[words[0]]
        path.append(words.pop(0))
    assert path or words in (["--help"], ["--version"]), f"{page}: no such command"
    known = _options(tuple(path))
    used = {word.partition("=")[0] for word in words if word.startswith("--") and " " not in word}
    assert used <= known, f"{page}: unknown options {sorted(used - known)}"
