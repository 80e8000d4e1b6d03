"""A server's process tree, as the side that uses it sees it. The other half is ``supervise.py``."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from loadgen.targets import supervise

log = logging.getLogger(__name__)

_DISK_FULL = 4096
_MARGIN = supervise.LEFTOVER_GRACE + supervise.KILL_PATIENCE + 3.0


class ServerProcess:
    """A command that runs, with everything it starts, until :meth:`stop` or until this process ends.

    The command gets a session of its own (a Ctrl-C at the terminal does not reach it), its output goes to
    ``log_path``. It ends on every way out of this process: ``stop``, an exception, SIGKILL.
    Raises OSError if the log cannot be opened.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        grace: float = 10.0,
    ) -> None:
        self.log_path = log_path
        self._grace = grace
        supervisor = [sys.executable, "-P", supervise.__file__, str(os.getpid()), str(grace)]
        with open(log_path, "ab") as output:
            self._supervisor = subprocess.Popen(
                [*supervisor, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The server's exit status (128 + N after signal N), None while it runs. Its tree is gone by then."""
        return self._supervisor.poll()

    def stop(self) -> int:
        """End the whole tree and return the exit status. May be called again. An interrupt cuts it short."""
        try:
            self.ask()  # from here on the tree ends, whatever happens to us
            self._supervisor.wait(self._grace + _MARGIN)
        except subprocess.TimeoutExpired:
            self._kill()
        except BaseException:
            self.stop_at_once()
            raise
        if self._supervisor.stdin:
            self._supervisor.stdin.close()
        return self._supervisor.returncode

    def stop_at_once(self) -> None:
        """End the whole tree without grace."""
        self._supervisor.terminate()
        self._supervisor.wait(_MARGIN)

    def ask(self) -> None:
        """Let the tree end, with its grace, and do not wait for it."""
        if self._supervisor.stdin and not self._supervisor.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                os.write(self._supervisor.stdin.fileno(), b".")

    def _kill(self) -> None:
        """The supervisor itself does not answer: end the tree from here."""
        log.warning("the server's supervisor (pid %d) hangs: killing its tree", self._supervisor.pid)
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._supervisor.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self._supervisor.kill()
        self._supervisor.wait()

    def finds_taken(self, port: int) -> bool:
        """True if a process that is older than ours listens on ``port``; False too where one cannot see."""
        with contextlib.suppress(psutil.Error):
            began = psutil.Process(self._supervisor.pid).create_time()
            return any(
                psutil.Process(listener.pid).create_time() < began
                for listener in psutil.net_connections("tcp")
                if listener.status == psutil.CONN_LISTEN and listener.laddr[1:] == (port,) and listener.pid
            )
        return False

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the log, as text; at most 64 KiB are read. Says so if its disk is full."""
        try:
            with open(self.log_path, "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - (1 << 16)))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(the log {self.log_path} cannot be read: {error.strerror})"
        tail = text.splitlines()[-lines:]
        if shutil.disk_usage(self.log_path.parent).free < _DISK_FULL:
            tail.append(f"({self.log_path.parent}: No space left on device: the log is incomplete)")
        return "\n".join(tail)
