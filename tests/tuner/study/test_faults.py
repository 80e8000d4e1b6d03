"""Faults that must not hurt: nothing is left running, nothing is lost, and the study goes on.

What has a test elsewhere: a port that is taken (loadgen/test_targets.py), the database gone and two workers
started at once (test_scale_out.py, test_storage.py), Ctrl-C once and twice (test_processes.py).
"""

import ast
import contextlib
import errno
import itertools
import json
import os
import resource
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest
from analytic_target import AnalyticTarget
from rich.console import Console

import tuner.report.report as report_module
import tuner.report.study_result as study_result_module
from loadgen.measure.clock import UnixClock
from loadgen.measure.record import Records
from loadgen.target import CLIENT_KILLED, RunFailed, StartFailed
from loadgen.targets.scraper import Scraper
from loadgen.targets.server import ServerTarget
from servers.files import write_atomically
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import GeneratedLoad
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench, ClientKilled, Criteria, SetupFailed
from tuner.workers.coordination import HeartbeatThread
from tuner.workers.local_workers import LocalWorker, LocalWorkers, WorkersError, device_shares
from tuner.workers.storage import open_study

ROOT = Path(__file__).parents[3]
FAKE = ROOT / "tests" / "fake_server.py"
SLO = parse_slo("itl")


class Notebook(Observer):
    def __init__(self, on_load: Any = lambda: None) -> None:
        self.notes: list[str] = []
        self._on_load = on_load

    def note(self, text: str) -> None:
        self.notes.append(text)

    def load(self, progress: Any) -> None:
        if progress.sent:
            self._on_load()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Optimizers of one study, one after the other, as a process that dies and is started again."""
    storage = optuna.storages.InMemoryStorage()

    def build(target: AnalyticTarget, notebook: Any = None) -> Optimizer:
        job = Job(rate=1.0, budget=None, trials=5, run_seconds=20.0, pairs=2, strategy="random", prior="none")
        bench = Bench(target, notebook or Notebook(), Interrupts(), tmp_path)
        return Optimizer(job, bench, open_study(storage, "s", SLO.objective))

    return build


def configs(optimizer: Optimizer) -> list[Any]:
    launched = [r for r in optimizer.study.results if r.status in ("measured", "stopped", "failed")]
    return [json.dumps(dict(r.config), sort_keys=True) for r in launched]


def assert_whole(optimizer: Optimizer, trials: int = 5) -> None:
    found = configs(optimizer)
    assert len(found) == len(set(found)) == 1 + trials
    assert not optimizer.study.running


@pytest.fixture
def real_trial(tmp_path: Path) -> Iterator[Any]:
    """A trial of two short loads against a server process with a fault."""
    children = set(psutil.Process().children(recursive=True))

    def run(*fault: Any, notebook: Any = None, **options: Any) -> Any:
        words = [sys.executable, "-S", str(FAKE), "fake", "--time-scale", "0.1", *fault]
        target = ServerTarget(f"{shlex.join(words)} {{flags}} --port {{port}}", log_dir=tmp_path, **options)
        bench = Bench(target, notebook or Notebook(), Interrupts(), tmp_path)
        proposal: Any = SimpleNamespace(number=0, request_set=0, config={"max_num_seqs": 8}, origin="test")
        optimizer = SimpleNamespace(job=Job(workload="random", rate=20.0, run_seconds=2.0), profile=None)
        load = GeneratedLoad(_workload(), 0, 2.0, optimizer.job.rate, None)
        bounds = SLO.resolve(lambda metric, cls: float("nan"))
        return bench.trial(proposal, {}, lambda server: load, Criteria(SLO, bounds))

    yield run
    left = set(psutil.Process().children(recursive=True)) - children
    assert not left, "nothing is left running"


def _workload() -> Any:
    from loadgen.plan.workload import preset

    return preset("random", max_model_len=2048, vocab_size=1000, scale=0.1)


def test_a_server_that_the_kernel_kills(real_trial: Any) -> None:
    result = real_trial("--fault", "killed-mid-run:6")
    assert result.status == "failed"
    assert "died under load: killed" in result.reason
    assert "short of memory" in result.reason


def test_a_server_that_says_it_is_healthy_and_then_hangs(real_trial: Any) -> None:
    result = real_trial("--fault", "health-then-hang", probe_timeout=0.5)
    assert result.status == "failed"
    assert "did not start: hangs" in result.reason


def test_a_server_that_hangs_in_the_middle_of_a_load(
    real_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.study.trial.WATCHDOG_SECONDS", 0.2)
    monkeypatch.setattr("tuner.study.trial.WATCHDOG_FACTOR", 1.0)
    result = real_trial("--fault", "hang-mid-run:6")
    assert result.status == "failed"
    assert "hangs: a load of" in result.reason


def kill_the_client() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "loadgen.wire.worker" in child.cmdline():
                child.kill()


def test_a_client_that_is_killed_says_nothing_of_the_config(real_trial: Any) -> None:
    with pytest.raises(ClientKilled, match="ended with status -9"):
        real_trial(notebook=Notebook(kill_the_client))


def client_killed_where(which: Callable[[Any], bool]) -> Callable[[Any], None]:
    """A fault of those runs of which ``which`` says so, given their config."""

    def fault(config: Any) -> None:
        if which(config):
            raise RunFailed(CLIENT_KILLED, "the client process ended with status -9")

    return fault


def test_a_trial_whose_client_was_killed_is_tried_again(make: Callable[..., Optimizer]) -> None:
    loads = itertools.count()
    target, notebook = AnalyticTarget(run_fault=client_killed_where(lambda c: next(loads) == 4)), Notebook()
    optimizer = make(target, notebook)
    optimizer.run()
    assert_whole(optimizer)
    assert [r.status for r in optimizer.study.results].count("interrupted") == 1
    assert any("is lost, and tried again: the client process" in note for note in notebook.notes)
    assert target.open_now == 0


def test_a_config_that_always_costs_the_client_its_life_does_not_end_the_study(
    make: Callable[..., Optimizer],
) -> None:
    small = "max_num_seqs"
    optimizer = make(AnalyticTarget(run_fault=client_killed_where(lambda c: c[small] < 128)))
    optimizer.run()
    failed = [r for r in optimizer.study.results if r.status == "failed"]
    assert failed
    assert all("died twice while this config was tried" in r.reason for r in failed)


def test_a_baseline_without_its_client_ends_the_run_and_the_next_one_goes_on(
    make: Callable[..., Optimizer],
) -> None:
    loads = itertools.count()
    target = AnalyticTarget(run_fault=client_killed_where(lambda c: next(loads) == 1))
    with pytest.raises(SetupFailed):
        make(target).run()
    optimizer = make(target)
    optimizer.run()
    assert_whole(optimizer)


def test_a_port_that_stays_taken_ends_the_run_and_the_next_one_goes_on(
    make: Callable[..., Optimizer],
) -> None:
    opened = itertools.count()

    def taken(config: Any) -> None:
        if next(opened) == 2:
            raise StartFailed("port_taken", "another server answers on port 8000")

    with pytest.raises(SetupFailed, match="port 8000"):
        make(AnalyticTarget(start_fault=taken)).run()
    optimizer = make(AnalyticTarget())
    optimizer.run()
    assert_whole(optimizer)


def no_space(path: Path, parts: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_report_that_cannot_be_written_costs_the_report_only(
    make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = make(AnalyticTarget())
    monkeypatch.setattr(report_module, "write_atomically", no_space)
    result = study_result_module.finish_study(optimizer)
    result.show(Console(stderr=True), as_json=False)
    said = capsys.readouterr()
    assert said.out.splitlines() == list(result.lines)
    assert "error: the report cannot be written: [Errno 28] No space left on device" in said.err
    monkeypatch.undo()
    again = make(AnalyticTarget())
    written = study_result_module.finish_study(again)
    assert {Path(file).name for file in written.files} == {"report.html", "report.md", "report.json"}
    assert written.lines == result.lines
    assert_whole(again)


def test_a_disk_that_is_full_time_and_again_says_nothing_of_the_config(
    make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = itertools.count()
    save = Records.save
    monkeypatch.setattr(Records, "save", lambda *a: no_space(a[1], ()) if next(saved) >= 4 else save(*a))
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            make(AnalyticTarget()).run()
    monkeypatch.undo()
    optimizer = make(AnalyticTarget())
    optimizer.run()
    assert_whole(optimizer)
    assert [r.status for r in optimizer.study.results].count("interrupted") == 3
    assert "failed" not in {r.status for r in optimizer.study.results}


def test_a_file_that_runs_out_of_space_leaves_the_old_one_whole(tmp_path: Path) -> None:
    """The kernel's own limit, as a full disk: in a fork, for it is the process's."""
    path = tmp_path / "report.md"
    write_atomically(path, ["old"])
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            write_atomically(path, ["x" * 100_000])
        except OSError as error:
            os._exit(error.errno or 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == errno.EFBIG
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes a day back or forth whenever it is read."""
    jumps = itertools.cycle([86400.0, -86400.0])
    seconds, nanoseconds = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: seconds() + next(jumps))
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + round(next(jumps) * 1e9))


def test_a_study_under_a_clock_that_jumps(make: Callable[..., Optimizer], jumping_clock: Any) -> None:
    optimizer = make(AnalyticTarget())
    optimizer.run()
    assert_whole(optimizer)
    assert 0 <= optimizer.clock.spent < 3600
    assert all(0 <= r.seconds["total"] < 3600 for r in optimizer.study.results)


def test_stamps_under_a_clock_that_jumps(jumping_clock: Any) -> None:
    clock = UnixClock()
    stamps = [clock.ms() for _ in range(10)]
    assert stamps == sorted(stamps)
    with Scraper(lambda: "x 1") as scraper:
        pass
    first, last = (stamp for stamp, _ in scraper.scrapes)
    assert 0 <= last - first < 3_600_000


LABELS = {
    "engine/server/responses.py": "the created field of an answer",
    "engine/server/api.py": "the created field of the models",
    "engine/text/chat_template.py": "a template asks for the date",
    "engine/metrics/families.py": "the created sample of a counter",
    "engine/metrics/prometheus.py": "when adapters ran, as lora_requests_info tells it",
    "loadgen/measure/clock.py": "read once, moved by the monotonic clock",
    "loadgen/wire/client.py": "when a run began",
    "loadgen/recording/proxy.py": "when a request came; intervals are monotonic",
    "loadgen/wire/completion.py": "Retry-After may be a date",
    "doctor/cli.py": "a line's time of day",
    "doctor/metrics/period.py": "the time zone",
    "doctor/metrics/sources.py": "the end of a window that Prometheus is asked for",
    "doctor/output/watch.py": "a line's time of day",
}
"""Who may read the wall clock, and for what: nothing of it is a duration."""


def _reads_the_wall_clock(text: str) -> Any:
    if not any(word in text for word in ("time.time", "time_ns", "from time import", "datetime.")):
        return False
    tree = ast.parse(text)
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    sources = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "time"]
    imported = {f"time.{alias.name}" for source in sources for alias in source.names}
    return not (used | imported).isdisjoint({"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"})


def test_durations_are_never_read_from_the_wall_clock() -> None:
    folders = ("engine", "loadgen", "doctor", "tuner")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    readers = {str(path.relative_to(ROOT)) for path in files if _reads_the_wall_clock(path.read_text())}
    assert readers <= set(LABELS), "say in LABELS what for, or take time.monotonic or loadgen.measure.clock"


class Database:
    """What a pulse needs of a storage."""

    def __init__(self) -> None:
        self.away = False

    def record_heartbeat(self, trial_id: Any) -> None:
        if self.away:
            raise optuna.exceptions.StorageInternalError("away")


def test_after_the_database_was_away_nobody_is_judged_for_a_while() -> None:
    database: Any = Database()
    pulse = HeartbeatThread(database, 10.0)
    pulse.try_to_beat()
    assert pulse.steady_since == float("-inf")
    database.away = True
    pulse.try_to_beat()
    assert pulse.steady_since == float("inf")
    database.away = False
    pulse.try_to_beat()
    assert pulse.steady_since <= time.monotonic()
    since = pulse.steady_since
    pulse.try_to_beat()
    assert pulse.steady_since == since


def local(tmp_path: Path, code: str, name: str = "worker-1") -> LocalWorker:
    return LocalWorker(name, [sys.executable, "-S", "-c", code], tmp_path / f"{name}.log", {})


def test_a_worker_that_is_killed_is_started_again(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    code = (
        f"import os, pathlib; marker = pathlib.Path({str(marker)!r}); first = not marker.exists(); "
        "marker.touch(); first and os.kill(os.getpid(), 9); print('measured')"
    )
    said: list[str] = []
    with LocalWorkers([local(tmp_path, code)], said.append) as workers:
        assert workers.wait() == [0]
    assert said == ["worker-1: ended by signal 9; starting it again", "worker-1: measured"]


def test_one_that_is_killed_again_and_again_is_given_up(tmp_path: Path) -> None:
    with LocalWorkers([local(tmp_path, "import os; os.kill(os.getpid(), 9)")], lambda line: None) as workers:
        assert workers.wait() == [137]
        assert workers.workers[0].restarts == 2


def test_leaving_ends_every_worker(tmp_path: Path) -> None:
    names = ("worker-1", "worker-2")
    coordination = [
        local(tmp_path, "import time; print('up', flush=True); time.sleep(600)", name) for name in names
    ]
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt), LocalWorkers(coordination, lambda line: None):
        raise KeyboardInterrupt
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize(
    ("devices", "workers", "given"),
    [
        (["0", "1", "2", "3"], 4, ["0", "1", "2", "3"]),
        (["0", "1", "2", "3"], 2, ["0,1", "2,3"]),
        (["4", "6", "GPU-1f"], 2, ["4", "6"]),
        ([], 3, [None, None, None]),
    ],
)
def test_each_worker_has_its_share_of_the_gpus(
    devices: Any, workers: int, given: list[None] | list[str]
) -> None:
    assert device_shares(devices, workers) == given


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(WorkersError, match=r"--workers 3: 2 GPU\(s\) are visible \(0,1\)"):
        device_shares(["0", "1"], 3)
