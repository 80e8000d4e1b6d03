"""``vtune optimize`` as a process against the fake server: how to say it, and what it has left behind."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
import psutil

FAKE = Path(__file__).parents[2] / "fake_server.py"
PATIENCE_SECONDS = 240.0
"""Of a machine that is busy with other things."""
PRELOADED = (
    "vtune_cli", "tuner.command", "alembic.command", "alembic.context", "optuna.storages._rdb.models",
    "engine.sim.server", "plotly.graph_objects",
)  # fmt: skip
"""What a study imports: 1.5 s of every process."""
SERVER = multiprocessing.get_context("forkserver")
"""One process that has imported this and nothing of pytest, and is forked for every ``vtune``."""
SERVER.set_forkserver_preload(list(PRELOADED))


class Vtune:
    """``vtune ARGUMENTS`` in ``place``: a process of its own, which writes to NAME.out and NAME.err there."""

    def __init__(
        self, place: Path, *arguments: str, name: str = "vtune", environment: Mapping[str, str] | None = None
    ) -> None:
        self.out, self.err = logs = place / f"{name}.out", place / f"{name}.err"
        for log in logs:
            log.touch()
        whole = {**os.environ, **(environment or {})}
        self._process = SERVER.Process(target=_run, args=(place, arguments, whole, logs))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join(PATIENCE_SECONDS)
        assert self.returncode is not None, f"does not end:\n{self.stderr}"
        return self.returncode

    def kill(self) -> None:
        """With SIGKILL, if it still runs."""
        self._process.kill()
        self._process.join()


def _run(
    place: Path, arguments: tuple[str, ...], environment: dict[str, str], logs: tuple[Path, Path]
) -> None:
    """In the new process."""
    from vtune_cli import main

    os.chdir(place)
    for number, log in zip((1, 2), logs, strict=True):
        with open(log, "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["vtune", *arguments]
    main()


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
