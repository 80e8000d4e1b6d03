"""One base for what a user caused: commands print that and nothing else, and docstrings name it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from pages import ROOT
from typer.testing import CliRunner

import doctor
import engine.errors
import loadgen
import loadgen.commands.options
import servers
import tuner
import vtune_cli
from servers.errors import UserError

OURS = (servers, loadgen, doctor, tuner)
BASES = {"UserError", "EngineUserError"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _modules() -> Iterator[ModuleType]:
    for package in OURS:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def test_every_error_that_is_shown_is_a_user_error() -> None:
    """What a command is not meant to show is not called an error, such as ``NoAnswer``."""
    strays = [
        f"{module.__name__}.{name}"
        for module in _modules()
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == module.__name__ and name.endswith("Error")
        if not issubclass(kind, UserError)
    ]
    assert not strays


def test_user_errors_are_nothing_else() -> None:
    """Not a ValueError as well, or what catches one of these would catch a bug, too."""
    list(_modules())

    def mixed(base: type[Exception]) -> Iterator[type[Exception]]:
        for kind in base.__subclasses__():
            yield from mixed(kind)
            if len(kind.__bases__) > 1:
                yield kind

    assert not [*mixed(UserError), *mixed(engine.errors.EngineUserError)]


RUN = ("bench", "run", "--url", "http://127.0.0.1:9", "--rate", "1", "--duration", "1s")


@pytest.mark.parametrize("bug", [ValueError, KeyError, RuntimeError, ConnectionError])
def test_a_bug_is_not_shown_as_the_users_mistake(
    monkeypatch: pytest.MonkeyPatch, bug: type[Exception]
) -> None:
    def broken(*_: object) -> None:
        raise bug("a bug of ours")

    monkeypatch.setattr(loadgen.commands.options.Load, "check", broken)
    result = CliRunner().invoke(vtune_cli.app, RUN)
    assert isinstance(result.exception, bug)
    assert "error:" not in result.output


@pytest.mark.parametrize("kind", [UserError, engine.errors.EngineUserError])
def test_a_users_mistake_is_one_message(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def refuses(*_: object) -> None:
        raise kind("--rate x: give a number")

    monkeypatch.setattr(loadgen.commands.options.Load, "check", refuses)
    result = CliRunner().invoke(vtune_cli.app, RUN)
    assert (result.exit_code, result.stderr) == (2, "error: --rate x: give a number\n")


def _user_errors() -> set[str]:
    """Names of the classes below the two bases, in all packages, without importing the engine's torch."""
    bases: dict[str, set[str]] = {}
    for file in _files():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    known = set(BASES)
    while grown := {name for name, parents in bases.items() if parents & known} - known:
        known |= grown
    return known


def _files() -> list[Path]:
    packages = (*(package.__name__ for package in OURS), "engine")
    return sorted(file for package in packages for file in (ROOT / package).rglob("*.py"))


def _raised(function: Function, known: set[str]) -> set[str]:
    """User errors that the body itself raises."""
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
                found.add(name)
    return found & known


def _public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Function]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public(node.body, f"{node.name}.")


def test_docstrings_name_the_user_errors_that_are_raised() -> None:
    known = _user_errors()
    silent = [
        f"{file.relative_to(ROOT)}:{function.lineno} {name}: Raises {', '.join(sorted(missing))}."
        for file in _files()
        for name, function in _public(ast.parse(file.read_text(encoding="utf-8")).body)
        if not _is_command(function)
        if (missing := {e for e in _raised(function, known) if e not in (ast.get_docstring(function) or "")})
    ]
    assert not silent, "\n".join(silent)


def _is_command(function: Function) -> bool:
    """Its docstring is its help: it has examples, and says what the exit codes mean."""
    return "Example" in (ast.get_docstring(function) or "")
