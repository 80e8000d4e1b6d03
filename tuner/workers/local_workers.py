"""``--workers N``: so many workers of a study on this machine, each with its share of the GPUs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from loadgen.targets.process import ServerProcess
from servers.connection import Connection
from servers.errors import UserError
from tuner.workers.machine import VISIBLE

STORAGE_VARIABLE = "VTUNE_STORAGE"
"""Says the storage in place of --storage: a password in it is then on no command line."""
GRACE_SECONDS = 60.0
"""Seconds that a worker has to stop its server and to give its trial back, unless one hurries it."""
MAX_RESTARTS = 2
"""Of one worker that is killed or crashes; its trial is retried in any case."""
_KILLED = 128
_POLL_SECONDS = 0.2


class WorkersError(UserError):
    """So many workers cannot be had here. The message says what to do."""


def device_shares(devices: Sequence[str], workers: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker: equal, neighbouring parts of ``devices``; None without any.

    What an uneven split leaves over stays unused. Raises WorkersError for more workers than devices.
    """
    if not devices:
        return [None] * workers
    if workers > len(devices):
        raise WorkersError(
            f"--workers {workers}: {len(devices)} GPU(s) are visible ({','.join(devices)}), and servers on "
            f"one GPU disturb each other. Give at most {len(devices)}."
        )
    each = len(devices) // workers
    return [",".join(devices[k * each : (k + 1) * each]) for k in range(workers)]


@dataclass
class LocalWorker:
    """One worker, started again when it dies."""

    name: str
    command: Sequence[str]
    log: Path
    environment: dict[str, str]
    process: ServerProcess | None = None
    restarts: int = 0
    status: int | None = None
    """Of its end, once there is one."""
    _shown: int = 0

    def start(self) -> None:
        self.process = ServerProcess(
            self.command, log_path=self.log, env=self.environment, grace=GRACE_SECONDS
        )

    def poll(self, show: Callable[[str], None], restarts: int = MAX_RESTARTS) -> None:
        """Show what it has said since, and see to its end."""
        if self.process is None or self.status is not None:
            return
        status = self.process.poll()
        for line in self._new_lines(whole=status is None):
            show(f"{self.name}: {line}")
        if status is None:
            return
        self.process.stop()  # closes what leads to it
        if status > _KILLED and status != _KILLED + 2 and self.restarts < restarts:
            self.restarts += 1
            show(f"{self.name}: ended by signal {status - _KILLED}; starting it again")
            self.start()
        else:
            self.status = status

    def _new_lines(self, whole: bool) -> list[str]:
        """Lines of the log that were not shown yet; while it runs, only ``whole`` ones."""
        with open(self.log, "rb") as file:
            file.seek(self._shown)
            text = file.read()
        if whole:
            text = text[: text.rfind(b"\n") + 1]
        self._shown += len(text)
        return text.decode(errors="replace").splitlines()


@dataclass
class LocalWorkers:
    """A context manager: however it is left, no worker is left behind."""

    workers: list[LocalWorker]
    show: Callable[[str], None]
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> LocalWorkers:
        self._stack.callback(self._end)
        try:
            for worker in self.workers:
                worker.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self) -> list[int]:
        """The exit status of each, once all have ended."""
        while any(worker.status is None for worker in self.workers):
            for worker in self.workers:
                worker.poll(self.show)
            time.sleep(_POLL_SECONDS)
        return [worker.status for worker in self.workers if worker.status is not None]

    def _end(self) -> None:
        """All at once, so that one grace is enough. A further interrupt ends those that are left at once."""
        running = [w.process for w in self.workers if w.process is not None and w.status is None]
        for process in running:
            process.ask()
        interrupted: BaseException | None = None
        for process in running:
            try:
                process.stop() if interrupted is None else process.stop_at_once()
            except KeyboardInterrupt as error:
                interrupted = error
        for worker in self.workers:
            worker.poll(self.show, restarts=0)
        if interrupted is not None:
            raise interrupted


def local_workers(
    study: str,
    url: str,
    out: Path,
    shared: Sequence[str | None],
    start_timeout: float,
    connection: Connection,
    show: Callable[[str], None],
) -> LocalWorkers:
    """Workers that join ``study``, one for each of ``shares``; each writes below ``out``."""
    workers = []
    for number, devices in enumerate(shared, start=1):
        name = f"worker-{number}"
        command = [
            sys.executable, "-c", "import vtune_cli; vtune_cli.main()", "optimize", "--study", study,
            "--out", str(out / name), "--start-timeout", f"{start_timeout:.0f}s", *connection.words(),
            "--yes",  # the user was asked before
        ]  # fmt: skip
        environment = {STORAGE_VARIABLE: url, **connection.environment()}
        if devices is not None:
            environment[VISIBLE] = devices
        workers.append(LocalWorker(name, command, out / f"{name}.log", environment))
    return LocalWorkers(workers, show)
