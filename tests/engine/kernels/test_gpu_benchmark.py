"""``benchmarks/engine/gpu.py`` without a GPU: it says so, and its dry run goes through all of its code."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.engine.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no CUDA device")


def test_the_dry_run_goes_through(tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is for Linux only")
    done = run("--dry-run", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Triton's interpreter (a dry run)" in done.stdout
    assert "WRONG" not in done.stdout
    figures = json.loads((tmp_path / "figures.json").read_text())
    names = [name for name, _, _ in figures["correctness"]]
    assert len(names) == len(set(names)) >= 18
    assert [row["name"] for row in figures["attention"]] == ["prefill 40", "decode 2 x 70"]
    assert [row["mode"] for row in figures["engine"]] == ["eager", "graphs", "graphs, async"]
    assert all(row["tokens_per_s"] > 0 for row in figures["engine"])
