"""A server's process tree ends with its user, on every way out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from loadgen.targets import supervise
from loadgen.targets.process import ServerProcess

FAKE = Path(__file__).parents[2] / "fake_server.py"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
STUBBORN += "time.sleep(600)"


def wait_for(condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
    """Poll; a failure to happen is a failure of the test, however slow the machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def tree(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def start(log: Path, *command: str, grace: float = 0.3) -> ServerProcess:
    return ServerProcess(command, log_path=log, grace=grace)


def started(log: Path, word: bytes = b"up", times: int = 1) -> None:
    wait_for(lambda: log.exists() and log.read_bytes().count(word) >= times, f"{word!r} in the log")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every process that a test started is gone when it ends."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    assert not alive(left)


def test_exit_status_and_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(
        log, sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); exit(3)"
    )
    wait_for(lambda: process.poll() is not None, "the end of the server")
    assert process.poll() == process.stop() == 3
    assert sorted(process.log_tail().splitlines()) == ["err", "out"]


def test_a_signal_is_reported_as_shells_do(tmp_path: Path) -> None:
    process = start(tmp_path / "log", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    wait_for(lambda: process.poll() is not None, "the end of the server")
    assert process.stop() == 128 + 9


def test_a_command_that_cannot_run(tmp_path: Path) -> None:
    process = start(tmp_path / "log", str(tmp_path))
    assert process.stop() == supervise.CANNOT_START
    assert process.log_tail() == f"cannot start {tmp_path}: Permission denied"


def test_stop_is_gentle_first_and_may_be_repeated(tmp_path: Path) -> None:
    gentle = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('bye'))); "
    process = start(
        tmp_path / "log", sys.executable, "-c", gentle + "print('up', flush=True); time.sleep(600)", grace=60
    )
    started(tmp_path / "log")
    assert process.stop() == process.stop() == 0
    assert process.log_tail().endswith("bye")


def test_the_whole_tree_ends_however_stubborn(tmp_path: Path) -> None:
    """A server that ignores SIGTERM, a child in another session, and an orphan of an ended child."""
    log = tmp_path / "log"
    code = f"""
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stubborn = [sys.executable, "-S", "-c", {STUBBORN!r}]
        subprocess.Popen(stubborn, start_new_session=True)
        between = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"
        subprocess.run([sys.executable, "-S", "-c", between, *stubborn])
        print("up", flush=True)
        time.sleep(600)
    """
    process = start(log, sys.executable, "-c", textwrap.dedent(code))
    started(log, times=3)
    processes = tree(process._supervisor.pid)
    assert len(processes) == 4
    assert process.stop() == 128 + signal.SIGKILL
    assert not alive(processes)


def test_what_a_server_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = f"""
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN!r}])
        while "\\n" not in open({str(log)!r}).read():
            time.sleep(0.02)
        print(child.pid, flush=True)
    """
    process = start(log, sys.executable, "-c", textwrap.dedent(code))
    wait_for(lambda: process.poll() is not None, "the end of the tree")
    assert process.stop() == 0
    _, pid = process.log_tail().split()
    assert not psutil.pid_exists(int(pid))


def test_the_server_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(log, sys.executable, "-S", "-c", STUBBORN)
    started(log)
    processes = tree(process._supervisor.pid)
    process._supervisor.kill()
    wait_for(lambda: not alive(processes), "the end of the server")
    assert process.stop() == -signal.SIGKILL


def test_a_hanging_supervisor_is_killed_with_its_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    process = start(log, sys.executable, "-S", "-c", STUBBORN)
    started(log)
    processes = tree(process._supervisor.pid)
    monkeypatch.setattr("loadgen.targets.process._MARGIN", 0.0)
    process._supervisor.send_signal(signal.SIGSTOP)
    process.stop()
    wait_for(lambda: not alive(processes), "the end of the tree")


PARENT = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from loadgen.targets.process import ServerProcess

    log, grace, *command = sys.argv[1:]
    process = ServerProcess(command, log_path=Path(log), grace=float(grace))
    print("started", flush=True)
    try:
        time.sleep(600)
    finally:
        print("stopping", flush=True)
        process.stop()
""")


@contextmanager
def parent(code: str, log: Path, grace: float) -> Iterator[subprocess.Popen[str]]:
    """A program that uses a stubborn server, after it has said so; killed when the block is left."""
    command = [sys.executable, "-c", code, str(log), str(grace), sys.executable, "-S", "-c", STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("moment", ["at once", "when it is up"])
def test_a_killed_parent_leaves_nothing(tmp_path: Path, moment: str) -> None:
    log = tmp_path / "log"
    with parent(PARENT, log, 0.2) as user:
        if moment == "when it is up":
            started(log)
        processes = tree(user.pid)[1:]
        user.kill()
        wait_for(lambda: not alive(processes), "the end of the tree")


def test_ctrl_c_twice_cuts_the_grace_short(tmp_path: Path) -> None:
    """The first interrupt stops the server, which has 10 minutes; the second ends it now."""
    log = tmp_path / "log"
    with parent(PARENT, log, 600) as user:
        started(log)
        processes = tree(user.pid)
        user.send_signal(signal.SIGINT)
        assert user.stdout
        assert user.stdout.readline() == "stopping\n"
        user.send_signal(signal.SIGINT)
        wait_for(lambda: not alive(processes), "the end of everything")


def test_a_lifeline_held_by_somebody_else_does_not_keep_the_server(tmp_path: Path) -> None:
    """A forked child of the parent still holds the pipe when the parent is killed."""
    log = tmp_path / "log"
    forking = PARENT.replace('print("started"', 'import os; os.fork() or time.sleep(600); print("started"')
    with parent(forking, log, 0.2) as user:
        started(log)
        children = psutil.Process(user.pid).children()
        fork = next(p for p in children if p.cmdline()[:2] == [sys.executable, "-c"])
        servers = [p for p in tree(user.pid)[1:] if p != fork]
        try:
            assert len(servers) == 2
            user.kill()
            wait_for(lambda: not alive(servers), "the end of the server")
        finally:
            fork.kill()


def test_a_full_disk_costs_the_log_and_not_the_server(tmp_path: Path) -> None:
    """The log may grow to 4 KiB (RLIMIT_FSIZE of the supervisor); the server prints 1 MB and goes on."""
    code = """
        import resource, sys
        from pathlib import Path
        from loadgen.targets.process import ServerProcess

        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        chatty = "for _ in range(1000): print('x' * 1000, flush=True)"
        process = ServerProcess([sys.executable, "-c", chatty], log_path=Path(sys.argv[1]))
        while process.poll() is None:
            pass
        print(process.stop(), len(process.log_tail()))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "log")], capture_output=True, text=True
    )
    assert result.stdout.split()[0] == "0", result.stderr
    assert os.path.getsize(tmp_path / "log") == 4096


def test_the_tail_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(b"line %d \xff" % number for number in range(20_000)))
    process = start(log, sys.executable, "-c", "")
    process.stop()
    assert process.log_tail(2) == "line 19998 \ufffd\nline 19999 \ufffd"
    monkeypatch.setattr("loadgen.targets.process._DISK_FULL", 1 << 62)
    assert "No space left on device" in process.log_tail(2)
    log.unlink()
    assert "cannot be read" in process.log_tail()
