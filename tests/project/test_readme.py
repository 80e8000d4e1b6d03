"""What README.md shows is what the commands print, where that is the same on every machine."""

import os
import subprocess
import sys

import pytest
from pages import ROOT

SCRAPES = ROOT.parent / "shared" / "scrapes" / "kv-starved"
README = (ROOT / "README.md").read_text()


def printed(*words: str, cwd: os.PathLike[str] = ROOT) -> str:
    """Standard output of ``vtune`` with these words, without the blank lines around it."""
    command = [sys.executable, "-c", "from vtune_cli import main; main()", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout.strip()


def test_the_budget_of_every_step() -> None:
    examples = ROOT / "docs" / "examples"
    config, requests = examples / "explain-config.json", examples / "explain-requests.json"
    assert f"```\n{printed('explain', '--config', str(config), '--requests', str(requests))}\n```" in README


@pytest.mark.skipif(not SCRAPES.is_dir(), reason="the recordings are not beside this checkout")
def test_a_diagnosis() -> None:
    words = ("doctor", "--series", "series.prom.gz", "--log", "server.log.gz", "--no-queries")
    assert f"$ vtune {' '.join(words)}\n{printed(*words, cwd=SCRAPES)}\n```" in README
