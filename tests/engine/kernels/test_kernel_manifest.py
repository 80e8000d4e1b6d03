"""What the Triton kernels compile to: the manifest's figures, and that the compiler gives them again.

Compiling is done in another process: in this one Triton interprets (see triton_interpreter.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
LINES: list[dict[str, Any]] = json.loads(
    (ROOT / "benchmarks" / "engine" / "kernel_manifest.json").read_text()
)["kernels"]
TARGETS = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a block may have."""


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_spills_and_everything_fits(target: str) -> None:
    lines = [line for line in LINES if line["target"] == target]
    assert len(lines) == len(LINES) / len(TARGETS)
    for line in lines:
        assert line["spills"] == 0, line
        assert line["shared"] <= TARGETS[target], line
        if target.startswith("sm"):
            assert line["registers"] * 32 * line["num_warps"] <= 65536, line


def test_attention_multiplies_on_tensor_cores() -> None:
    best = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
    attending = [line for line in LINES if line["kernel"].startswith("_attention")]
    assert len(attending) > 40
    for line in attending:
        assert line["mma"], line
        if line["case"].endswith("prefill"):
            assert line["mma"] == best[line["target"]], line


def compile_some(only: str, *targets: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is for Linux only")
    command = [sys.executable, "-m", "benchmarks.engine.kernel_manifest", "--only", only]
    command += [word for target in targets for word in ("--target", target)]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= len(targets)


def test_the_compiler_gives_the_manifest_again() -> None:
    """Some of it; ``python -m benchmarks.engine.kernel_manifest`` compiles everything."""
    compile_some("^(llama prefill|llama decode, split|llama fp8 cache write|norm of 576|silu)$", "sm_90")


def test_other_makers_too() -> None:
    compile_some("^(smollm2 decode, split|verify drawn drafts)$", "sm_80", "gfx942")
