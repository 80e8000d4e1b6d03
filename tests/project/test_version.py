"""``vtune --version``: the package's version, and the commit where it runs from a checkout."""

from __future__ import annotations

import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vtune_cli


@pytest.mark.parametrize(("commit", "shown"), [("", ""), ("1a2b3c4-dirty", " (1a2b3c4-dirty)")])
def test_it_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch, commit: str, shown: str) -> None:
    monkeypatch.setattr(vtune_cli, "_commit", lambda place: commit)
    result = CliRunner().invoke(vtune_cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"vtune {version('vtune-llm')}{shown}\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_of_a_checkout(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", "-C", str(tmp_path), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert vtune_cli._commit(tmp_path) == ""
    git("init", "--quiet")
    assert vtune_cli._commit(tmp_path) == "", "nothing is committed yet"
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "--quiet", "--message", "One")
    git("tag", "v9")
    commit = git("rev-parse", "--short", "HEAD")
    assert vtune_cli._commit(tmp_path) == commit
    (tmp_path / "file").write_text("another")
    assert vtune_cli._commit(tmp_path) == f"{commit}-dirty"


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vtune_cli._commit(tmp_path) == ""
