"""Runs one server for its parent and leaves nothing of it behind, however the parent ends.

    python supervise.py PARENT_PID GRACE_SECONDS COMMAND [ARGUMENT …]

A program of its own, because a parent that is killed with SIGKILL can clean up nothing. Its standard
input is the lifeline: a byte on it asks for the end, its closing says that the parent is dead. Then the
whole process tree is ended: SIGTERM to the server, SIGTERM to what the server left, SIGKILL to what is
left then. On Linux it adopts the tree's orphans (PR_SET_CHILD_SUBREAPER), so a child in another session,
or one whose parent has died, is found too.

The server's output is copied to standard output, which is the log; when the log's disk is full, lines are
lost and the server runs on. Exits with the server's status (128 + N when signal N ended it), or 127 if it
cannot be started. SIGTERM and SIGINT cut the grace short.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import psutil

CANNOT_START = 127
ORPHAN_GRACE = 2.0
"""Longest grace once no process waits for the end any more."""
LEFTOVER_GRACE = 1.0
"""Seconds that the processes a server left behind have between SIGTERM and SIGKILL."""
KILL_PATIENCE = 10.0
"""Seconds to wait for killed processes to disappear; one that sits in a driver call may not."""
_TURN = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Supervisor:
    """The server process, its output, and the lifeline to the parent."""

    def __init__(self, parent: int, grace: float, command: Sequence[str]) -> None:
        self._parent, self._grace = parent, grace
        self._hurry = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._output, inlet = os.pipe()
        try:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=inlet,
                stderr=inlet,
                start_new_session=True,
                # Safe here: this process has one thread. It covers the supervisor itself being killed.
                preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        finally:
            os.close(inlet)
        self._status: int | None = None
        self._asked = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_lifeline)
        self._selector.register(self._output, selectors.EVENT_READ, self._copy_output)

    def run(self) -> int:
        """Serve until the server or the parent ends; then end the whole tree. Returns the exit status."""
        while self._status is None and not self._asked and not self._hurry:
            self._turn()
        if self._status is None:
            self._signal([psutil.Process(self._server.pid)], signal.SIGTERM)
            self._wait(lambda: self._status is not None, lambda: self._grace)
        self._signal(self._tree(), signal.SIGTERM)
        self._wait(lambda: not self._tree(), lambda: LEFTOVER_GRACE)
        deadline = time.monotonic() + KILL_PATIENCE
        while (left := self._tree()) and time.monotonic() < deadline:
            self._signal(left, signal.SIGKILL)
            self._turn()
        for process in left:
            _write(f"process {process.pid} could not be killed\n".encode())
        self._turn(timeout=0)
        status = self._status
        return 128 + signal.SIGKILL if status is None else status if status >= 0 else 128 - status

    def _turn(self, timeout: float = _TURN) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()
        self._reap()
        if os.getppid() != self._parent:  # another process, e.g. a forked worker, may hold the lifeline open
            self._orphaned()

    def _wait(self, done: Callable[[], bool], patience: Callable[[], float]) -> None:
        """Turn until ``done``, or for ``patience`` seconds, which may shrink meanwhile."""
        began = time.monotonic()
        while not done() and not self._hurry and time.monotonic() - began < patience():
            self._turn()

    def _read_lifeline(self) -> None:
        if os.read(sys.stdin.fileno(), 1):
            self._asked = True
        else:
            self._selector.unregister(sys.stdin.fileno())
            self._orphaned()

    def _orphaned(self) -> None:
        self._asked = True
        self._grace = min(self._grace, ORPHAN_GRACE)

    def _copy_output(self) -> None:
        chunk = os.read(self._output, 1 << 16)
        if not chunk:
            self._selector.unregister(self._output)
        _write(chunk)

    def _reap(self) -> None:
        """Collect every ended child, adopted ones too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._server.pid:
                    self._status = self._server.returncode = os.waitstatus_to_exitcode(status)

    def _tree(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    @staticmethod
    def _signal(processes: Sequence[psutil.Process], number: int) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _on_signal(self, number: int, frame: object) -> None:
        self._hurry = True


def _write(data: bytes) -> None:
    with contextlib.suppress(OSError):  # disk full
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(arguments: Sequence[str]) -> int:
    parent, grace, *command = arguments
    try:
        supervisor = Supervisor(int(parent), float(grace), command)
    except OSError as error:
        _write(f"cannot start {command[0]}: {error.strerror}\n".encode())
        return CANNOT_START
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
