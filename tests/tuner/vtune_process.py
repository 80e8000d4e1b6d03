"""``vtune optimize`` as a process against the fake server: how to say it, and what it has left behind."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import psutil

FAKE = Path(__file__).parents[1] / "fake_server.py"
PATIENCE_SECONDS = 240.0
"""Of a machine that is busy with other things."""
VTUNE = [sys.executable, "-c", "from vtune_cli import main; main()"]


def target(*arguments: str, program: tuple[str, ...] = (sys.executable, "-S")) -> str:
    """``--target`` that starts the fake server."""
    words = [*program, str(FAKE), "fake", *arguments]
    return f"{shlex.join(words)} {{flags}} --port {{port}}"


def servers(place: Path) -> list[psutil.Process]:
    """Fake servers that run with ``place`` as their working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(FAKE) in process.cmdline() and process.cwd() == str(place):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_no_server_is_left(place: Path, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while servers(place):
        assert time.monotonic() < deadline, f"left running: {servers(place)}"
        time.sleep(0.05)


def wait_for(log: Path, text: str, times: int = 1, seconds: float = PATIENCE_SECONDS) -> None:
    """Until ``log`` has ``text`` so many times."""
    deadline = time.monotonic() + seconds
    while log.read_text().count(text) < times:
        assert time.monotonic() < deadline, f"{text!r} was not seen in:\n{log.read_text()}"
        time.sleep(0.02)


def trials(url: str, study: str = "s") -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(url)
    try:
        return optuna.load_study(study_name=study, storage=storage).trials
    finally:
        storage.remove_session()
        storage.engine.dispose()


def launched(url: str) -> list[dict[str, Any]]:
    """Results of the trials that came to something."""
    results = [t.user_attrs["result"] for t in trials(url) if "result" in t.user_attrs]
    return [r for r in results if r["status"] in ("measured", "stopped", "failed")]
