"""The command as a program among others: streams that are closed, full, cut off, or not UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


def run(shell: str, *descriptors: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``vtune`` is the command; it has ``descriptors`` beside its own streams."""
    script = f'vtune() {{ {sys.executable} -c "from vtune_cli import main; main()" "$@"; }}\n{shell}'
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("command", ["serve --help", "optimize --help", "playbook show overload"])
def test_an_encoding_that_lacks_a_character(command: str, encoding: str) -> None:
    result = run(f"vtune {command}", PYTHONIOENCODING=encoding, COLUMNS="60")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(result.stdout) > 1000


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    ("command", "code"), [("playbook list", 0), ("explain --config - --requests r.json", 2)]
)
def test_closed_streams(command: str, code: int, closed: str) -> None:
    result = run(f"vtune {command} {closed}")
    assert result.returncode == code
    assert "Traceback" not in result.stderr


def test_a_child_has_the_streams_that_were_closed() -> None:
    """What sends the load would else write its sockets into the descriptor of standard error."""
    child = "import os; [os.fstat(number) for number in (0, 1, 2)]"
    code = (
        f"import subprocess, sys, vtune_cli; vtune_cli._settle_streams(); "
        f"sys.exit(subprocess.run([sys.executable, '-S', '-c', '{child}']).returncode)"
    )
    assert run(f'{sys.executable} -c "{code}" <&- >&- 2>&-').returncode == 0


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_an_error_that_cannot_be_written_is_one() -> None:
    """Status 1 would say that no config holds the SLO."""
    assert run(f"vtune optimize --slo nonsense 2>{FULL}").returncode == 2


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["--help", "playbook list", "playbook show overload"])
def test_a_full_disk_under_the_output(command: str) -> None:
    result = run(f"vtune {command} >{FULL}")
    assert result.returncode == 2
    assert result.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("command", ["--help", "playbook list", "playbook show overload"])
def test_a_reader_that_leaves_early(command: str) -> None:
    result = run(f"vtune {command} | true")
    assert result.stderr == ""


@pytest.mark.parametrize("command", ["playbook list >", "optimize --slo nonsense 2>"])
def test_a_reader_that_leaves_early_is_no_answer(command: str) -> None:
    """Exit status 1 is one: the status is that of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = run(f"vtune {command}&{writer}; echo $?", writer)
    finally:
        os.close(writer)
    assert (result.stdout.strip(), result.stderr) == ("141", "")


def test_an_interrupt_while_modules_are_imported() -> None:
    code = (
        "import os, signal, sys, types\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tuner.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "import vtune_cli"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr) == (130, "")
