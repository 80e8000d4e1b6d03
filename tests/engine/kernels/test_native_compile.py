"""Compiling the C++ kernels: with others, after others, and under Ctrl-C. The compiler is a script."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving_kit import PATIENCE_SECONDS, VTUNE, make_model, process_alive, wait_until

from engine.kernels import native_library
from engine.kernels.native_library import NativeUnavailable, load_library

NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
pytestmark = pytest.mark.skipif(
    not set(native_library.cpu_features()) >= NEEDED, reason="this CPU lacks AVX-512"
)
MakeCompiler = Callable[[str], None]


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCompiler:
    """Give the g++ that is found a shell script for what it does, and the kernels an empty cache."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()

    def make(script: str) -> None:
        compiler = tmp_path / "g++"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)

    return make


def left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").glob(".native-*")]


def test_two_at_once_compile_once(make_compiler: MakeCompiler, tmp_path: Path) -> None:
    make_compiler(f'echo call >> {tmp_path}/calls; sleep 0.3; for last; do :; done; echo > "$({OUT})"')
    with ThreadPoolExecutor() as threads:
        for attempt in [threads.submit(load_library.__wrapped__) for _ in range(2)]:
            with pytest.raises(NativeUnavailable, match="does not load"):
                attempt.result()
    assert (tmp_path / "calls").read_text().split() == ["call"]


OUT = "printf '%s' \"$*\" | sed 's/.* -o \\([^ ]*\\) .*/\\1/'"
"""What follows ``-o`` on the compiler's command line."""


def test_what_a_killed_one_has_left_is_removed(make_compiler: MakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "cache" / ".native-killed").mkdir()
    make_compiler("exit 1")
    with pytest.raises(NativeUnavailable, match="no message"):
        load_library.__wrapped__()
    assert left_behind(tmp_path) == []


def test_messages_in_another_encoding_are_quoted(make_compiler: MakeCompiler) -> None:
    make_compiler(r"printf 'error: no \351l\351ment\n' >&2; exit 1")
    with pytest.raises(NativeUnavailable, match=r"error: no .l.ment"):
        load_library.__wrapped__()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_compiler_outlives_its_server(make_compiler: MakeCompiler, tmp_path: Path, how: int) -> None:
    make_compiler(f"echo $$ > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; exec sleep 600")
    model = make_model(tmp_path / "model", head_dim=32)
    command = [VTUNE, "serve", str(model), "--port", "0", "--load-format", "dummy"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until((tmp_path / "pid").exists, "the compiler runs")
        server.send_signal(how)
        assert server.wait(PATIENCE_SECONDS) == (130 if how == signal.SIGINT else -how)
    finally:
        server.kill()
        server.wait()
    compiler = int((tmp_path / "pid").read_text())
    wait_until(lambda: not process_alive(compiler), "the compiler is gone")
    wait_until(lambda: left_behind(tmp_path) == [], "its folder is removed")
    assert "Traceback" not in (tmp_path / "log").read_text()
