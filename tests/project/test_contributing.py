"""The worked examples of docs/contributing: each is carried out on a copy of the project.

In a page, a block whose info string has a second word is a new file of that name; a ``diff`` block changes a
file that is there, wherever its lines stand; a ``console`` block holds commands behind ``$`` and what they
print, in which a line ``...`` stands for any lines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from pages import ROOT
from reference_tables import TABLES, Table

from doctor.diagnosis import experiment, playbook
from servers.kind import ServerKind

FOLDER = ROOT / "docs" / "contributing"
PAGES = sorted(FOLDER.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
WORKED = [page for page in PAGES if page.name != "README.md"]
LINKED = ("benchmarks", "docs", "doctor", "engine", "loadgen", "playbooks", "servers", "tests", "tuner")
LINKED_FILES = ("pyproject.toml", "vtune_cli.py")


class Copy:
    """The project as links into this one; a file that is written, and the folders above it, are its own."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in (*LINKED, *LINKED_FILES):
            (place / name).symlink_to(ROOT / name)

    def write(self, name: str, text: str) -> None:
        folder = self.place
        for part in Path(name).parent.parts:
            folder /= part
            if folder.is_symlink():
                original = folder.resolve()
                folder.unlink()
                folder.mkdir()
                for item in original.iterdir():
                    if item.name != "__pycache__":
                        (folder / item.name).symlink_to(item)
            folder.mkdir(exist_ok=True)
        (self.place / name).unlink(missing_ok=True)
        (self.place / name).write_text(text)

    def patch(self, diff: str) -> None:
        name = ""
        for hunk in re.split(r"^(?=\+\+\+ |@@)", diff, flags=re.M):
            if named := re.match(r"\+\+\+ b/(\S+)\n", hunk):
                name = named[1]
            if not hunk.startswith("@@"):
                continue
            lines = [line for line in hunk.splitlines()[1:] if not line.startswith("--- ")]
            old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
            new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
            text = (self.place / name).read_text()
            assert text.count(old) == 1, f"{name} does not hold these lines once:\n{old}"
            self.write(name, text.replace(old, new))

    def run(self, command: str) -> str:
        """Standard output. Warnings go elsewhere, and must not be there."""
        program, *words = shlex.split(command)
        main = {"python": [], "vtune": ["-c", "from vtune_cli import main; main()"]}[program]
        done = subprocess.run(
            [sys.executable, *main, *words],
            cwd=self.place,
            env={
                **os.environ,
                "PYTHONPATH": str(self.place),
                "PYTHONDONTWRITEBYTECODE": "1",
                "COLUMNS": "80",
                "VTUNE_NATIVE": "0",  # a fresh machine would compile the C++ kernels first
                "PYTEST_ADDOPTS": "-p no:cacheprovider",
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (done.returncode, done.stderr) == (0, ""), f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.mark.parametrize("page", WORKED, ids=lambda page: page.stem)
def test_the_worked_example(page: Path, tmp_path: Path) -> None:
    copy = Copy(tmp_path)
    ran = 0
    for language, name, text in BLOCK.findall(page.read_text()):
        if name:
            copy.write(name, text)
        elif language == "diff":
            copy.patch(text)
        elif language == "console":
            for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
                found = copy.run(command)
                parts = [re.escape(part) for part in re.split(r"^\.\.\.\n", printed, flags=re.M)]
                assert re.fullmatch(r"(?:.*\n)*".join(parts), found), f"$ {command}\n{found}"
                ran += 1
    assert ran, "a page shows that its example works"


def test_every_page_is_listed() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text())
    assert listed == [*dict.fromkeys(listed)]
    assert {*listed, "README.md"} == {page.name for page in PAGES}


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_are_those_of_the_code(table: Table) -> None:
    assert table.split()[1] == table.text(), "run: .venv/bin/python tests/shared/reference_tables.py"


def test_the_fields_of_a_server_kind_exist() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (FOLDER / "server-kind.md").read_text(), re.M)
    assert rows
    assert set(re.findall(r"\w+", " ".join(rows))) <= {field.name for field in fields(ServerKind)}


@pytest.mark.parametrize(
    "keys",
    [
        playbook._REQUIRED,
        playbook._OPTIONAL,
        playbook._REMEDY_KEYS,
        experiment._STREAM,
        experiment._SIDE,
        experiment._OWN,
    ],
    ids=["required", "optional", "prescribe", "stream", "side", "reproduce"],
)
def test_the_grammar_of_front_matter_is_complete(keys: tuple[str, ...]) -> None:
    page = (FOLDER / "playbook.md").read_text()
    assert [key for key in keys if f"`{key}`" not in page and f"`{key}:" not in page] == []
