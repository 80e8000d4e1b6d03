"""The client in a process of its own: ``python -m loadgen.wire.worker``, spoken to over stdin and stdout.

The load must not share an interpreter with whatever its caller does (progress display, scrapes,
analysis): a thread that holds the GIL for 5 ms makes every stamp 5 ms late. The frames are a length
(8 bytes, big endian) and a pickle; both ends are this program.

parent: plan -> start_ns -> (nothing | one byte: stop). End of input stops the run too, so a worker
never outlives its parent. worker: "ready" -> Progress... -> WireLog.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from loadgen.plan.load_policy import Progress
from loadgen.wire.driver import drive
from loadgen.wire.messages import WireLog, WirePlan

NICENESS = -10
READY = "ready"


class WorkerDied(ChildProcessError):
    """The client process ended without a result; the message has its exit status."""


def write_frame(stream: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(8, "big") + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next message. Raises EOFError."""
    header = _read_exactly(stream, 8)
    return pickle.loads(_read_exactly(stream, int.from_bytes(header, "big")))


def _read_exactly(stream: IO[bytes], count: int) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Worker:
    """The parent's end of one client process. Use as a context manager: leaving it ends the process."""

    def __init__(self, plan: WirePlan) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "loadgen.wire.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._plan = plan

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._to, self._from):
            try:
                stream.close()
            except BrokenPipeError:
                continue

    def prepare(self) -> None:
        """Hand over the plan."""
        self._guard(lambda: write_frame(self._to, self._plan))

    def wait_ready(self) -> None:
        if self._receive() != READY:
            raise WorkerDied("the client process answered something unexpected")

    def start(self, start_ns: int) -> None:
        self._guard(lambda: write_frame(self._to, start_ns))

    def stop(self) -> None:
        """Ask for an early end; the result still comes."""
        self._guard(lambda: (self._to.write(b"."), self._to.flush()))

    def receive(self) -> Progress | WireLog:
        """Block for the next report; the last one is the WireLog."""
        message = self._receive()
        assert isinstance(message, Progress | WireLog)
        return message

    def _receive(self) -> Any:
        try:
            return read_frame(self._from)
        except EOFError:
            raise WorkerDied(f"the client process ended with status {self._process.wait()}") from None

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            raise WorkerDied(f"the client process ended with status {self._process.wait()}") from None


def serve(source: IO[bytes], to: IO[bytes]) -> None:
    """The child's side of the conversation. Raises EOFError or BrokenPipeError when the parent is gone."""
    plan: WirePlan = read_frame(source)
    write_frame(to, READY)
    start_ns: int = read_frame(source)
    stop = threading.Event()

    def listen() -> None:
        source.read(1)  # a byte, or the end of input: stop either way
        stop.set()

    def report(progress: Progress) -> None:
        with contextlib.suppress(BrokenPipeError):  # the end of input stops the run by itself
            write_frame(to, progress)

    threading.Thread(target=listen, daemon=True).start()
    log = drive(plan, start_ns, stop=stop.is_set, progress=report)
    write_frame(to, log)


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as it goes: a request in flight is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses its own "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _go_first() -> None:
    """Ahead of a server on the same cores, where that is permitted: the client needs a few per cent of one,
    and what it is late by is measured as the server's. A nicer rank alone lets a busy thread end its slice
    of 3 ms first."""
    with contextlib.suppress(AttributeError, OSError):  # not on macOS, not without the right to
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return
    with contextlib.suppress(OSError):
        os.nice(NICENESS)


def main() -> int:
    _allow_many_connections()
    _go_first()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    # Unbuffered: the listening thread must not hold a buffer's lock when the interpreter shuts down.
    with open(0, "rb", buffering=0, closefd=False) as source, open(1, "wb", closefd=False) as to:
        try:
            serve(source, to)
        except (EOFError, BrokenPipeError):
            os._exit(1)  # the parent is gone; nothing is left to flush to
    return 0


if __name__ == "__main__":
    sys.exit(main())
