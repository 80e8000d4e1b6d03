"""``vtune optimize`` as a process against a fake server: signals, resuming, and what is left running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import vtune_process
from vtune_process import PATIENCE_SECONDS, Vtune, assert_no_server_is_left, target, wait_for

pytestmark = pytest.mark.timeout(600)


SHORT: dict[str, Any] = {"rate": 50, "run_time": "0.5s"}
"""For a study that no signal must meet in the middle of a load."""
NO_PRIOR = ("--prior", "none")
"""Nothing is simulated where the search is not the point."""


def words(
    *arguments: Any, fake: Any = (), trials: int = 2, rate: int = 25, run_time: str = "1s"
) -> list[Any]:
    """A study of about a second a load; the start-up probe counts among the fake's completions."""
    common = ["--study", "s", "--out", "out"]
    if not arguments or arguments[0] != "resume":
        common += [
            "--target",
            target("--time-scale", "0.2", *fake),
            "--rate",
            str(rate),
            "--workload",
            "random",
        ]
        common += ["--run-time", run_time, "--pairs", "2", "--trials", str(trials)]
        common += ["--slo", "ttft_es95<60s"]  # held on however busy a machine
    else:
        arguments = arguments[1:]
    return ["optimize", *common, *arguments]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """A process in the background."""
    started: list[Vtune] = []

    def start_(*arguments: Any, **kwargs: Any) -> Any:
        name = f"vtune-{len(started)}"
        started.append(Vtune(tmp_path, *words(*arguments, **kwargs), name=name))
        return started[-1]

    yield start_
    for process in started:
        process.kill()


@pytest.fixture
def run(start: Any) -> Callable[..., Any]:
    """A process that has ended."""

    def run_(*arguments: Any, **kwargs: Any) -> Any:
        process = start(*arguments, **kwargs)
        process.wait()
        return process

    return run_


def url_of(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'out' / 'study.db'}"


def trials(tmp_path: Path) -> Any:
    return vtune_process.trials(url_of(tmp_path))


def launched(tmp_path: Path) -> Any:
    return vtune_process.launched(url_of(tmp_path))


def test_a_whole_study_with_a_region_that_runs_out_of_memory(run: Any, tmp_path: Path) -> None:
    budgets = ("--fix", "all", "--vary", "max_num_batched_tokens=512,4096")
    flags = ("--json", "--flags", "--max-num-batched-tokens 1024", *budgets)
    ran = run(*flags, fake=("--fault", "oom-above:2048"), **SHORT)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["verdict"] in ("better", "baseline")
    assert {"report.html", "report.md", "report.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert all(row["kv_tokens"] for row in report["kv_pool"])
    first_told = [t for t in report["trials"] if t["status"] != "duplicate"]
    by_budget = {t["config"]["max_num_batched_tokens"]: t for t in first_told}
    assert by_budget[1024]["status"] == "measured"
    assert by_budget[512]["status"] in ("measured", "stopped")
    assert by_budget[4096]["status"] == "failed"
    assert "CUDA out of memory" in by_budget[4096]["log_tail"]
    assert "a start costs" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert_no_server_is_left(tmp_path)


def test_kill_9_loses_one_trial_and_one_process_goes_on(start: Any, run: Any, tmp_path: Path) -> None:
    process = start(*NO_PRIOR, trials=2)
    wait_for(process.err, "  load, ", times=3)
    process.send_signal(signal.SIGSTOP)  # or it is done by the time that a busy machine has started another
    second = run("resume")
    assert second.returncode == 2
    assert "in use by another vtune" in second.stderr
    process.kill()
    before = launched(tmp_path)
    assert len(before) >= 2
    assert [t.state.name for t in trials(tmp_path)].count("RUNNING") == 1
    assert_no_server_is_left(tmp_path)
    ran = run("resume")
    assert ran.returncode == 0, ran.stderr
    assert "1 trial(s) whose process died will be tried again" in ran.stderr
    after = launched(tmp_path)
    assert after[: len(before)] == before, "what was measured stays as it was"
    configs = [json.dumps(r["config"], sort_keys=True) for r in after]
    assert len(set(configs)) == len(configs), "nothing is measured twice"
    assert len(after) == 1 + 2
    assert not [t for t in trials(tmp_path) if t.state.name == "RUNNING"]
    assert_no_server_is_left(tmp_path)


def test_ctrl_c_writes_the_report_and_says_how_to_go_on(start: Any, run: Any, tmp_path: Path) -> None:
    process = start(*NO_PRIOR)
    wait_for(process.err, "  load, ", times=2)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert process.stdout.startswith("Interrupted; best so far")
    assert "go on with: vtune optimize --study s --out out" in process.stderr
    assert "Traceback" not in process.stderr
    assert json.loads((tmp_path / "out" / "report.json").read_text())["verdict"] == "interrupted"
    assert_no_server_is_left(tmp_path)
    other = run("resume", "--rate", "7")
    assert other.returncode == 2
    assert "begun with other values of --rate" in other.stderr
    ran = run("resume", "--trials", "1")
    assert ran.returncode == 0, ran.stderr
    assert len(launched(tmp_path)) == 1 + 1


def test_ctrl_c_while_a_server_starts(start: Any, tmp_path: Path) -> None:
    process = start(fake=("--start-delay", "60"))
    wait_for(process.err, "starting the server")
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.stderr
    assert_no_server_is_left(tmp_path)


def test_a_second_ctrl_c_is_harder_and_leaves_no_server(start: Any, tmp_path: Path) -> None:
    process = start(fake=("--fault", "ignore-term"))
    wait_for(process.err, "  load, ")
    process.send_signal(signal.SIGINT)
    (log,) = (tmp_path / "out" / "logs").glob("*.log")
    wait_for(log, "SIGTERM is ignored")  # its grace has begun
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert "Traceback" not in process.stderr
    assert_no_server_is_left(tmp_path)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("oom", "out_of_memory"),
        ("error-in-stream", "requests failed"),
        ("die-mid-run:6", "died under load: out_of_memory"),
        ("killed-mid-run:6", "died under load: killed"),
    ],
)
def test_a_server_with_a_fault_ends_in_no_feasible_config(
    run: Any, tmp_path: Path, fault: str, reason: str
) -> None:
    ran = run(fake=("--fault", fault), trials=1, **SHORT)
    assert ran.returncode == 1, ran.stderr
    assert "No config served" in ran.stdout
    failed = launched(tmp_path)
    assert failed
    assert all(r["status"] == "failed" and reason in r["reason"] for r in failed), failed[0]["reason"]
    assert fault == "error-in-stream" or all(r["log_tail"] for r in failed)
    assert_no_server_is_left(tmp_path)


def test_a_port_that_is_always_taken_ends_the_run_with_what_to_do(run: Any, tmp_path: Path) -> None:
    ran = run(fake=("--fault", "port"))
    assert ran.returncode == 2
    assert "If the command sets the port itself, write {port} where it goes" in ran.stderr
    assert ran.stderr.count("address already in use") == 1
    assert "go on with: vtune optimize --study s" in ran.stderr
    assert_no_server_is_left(tmp_path)


def kill_a_client(pid: int) -> bool:
    """Whether a process that sends a load was there, and is killed."""
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "loadgen.wire.worker" in child.cmdline():
                child.kill()
                return True
    return False


def test_a_load_generator_that_is_killed_costs_nothing_but_time(start: Any, tmp_path: Path) -> None:
    process = start(*NO_PRIOR)
    wait_for(process.err, "  load, ", times=2)
    while not kill_a_client(process.pid):
        assert process.returncode is None, process.stderr
    assert process.wait() == 0
    assert "is lost, and tried again: the client process ended" in process.stderr
    assert len(launched(tmp_path)) == 1 + 2
    assert not [t for t in trials(tmp_path) if t.state.name == "RUNNING"]
    assert_no_server_is_left(tmp_path)


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    """In an interpreter of its own and in those that it starts: a day back or forth whenever it is read."""
    jumping = (
        "import itertools, time\n"
        "jumps, seconds, nanoseconds = itertools.cycle((86400, -86400)), time.time, time.time_ns\n"
        "time.time = lambda: seconds() + next(jumps)\n"
        "time.time_ns = lambda: nanoseconds() + next(jumps) * 10**9\n"
    )
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(jumping)
    ran = subprocess.run(
        [sys.executable, "-c", "from vtune_cli import main; main()", *words(*NO_PRIOR, trials=1, **SHORT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert 0 < report["seconds"] < 3600
    assert all(0 <= r["seconds"]["total"] < 3600 for r in launched(tmp_path))


def test_records_that_cannot_be_written(run: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "trials").write_text("in the way")
    ran = run(*NO_PRIOR, **SHORT)
    assert ran.returncode == 2
    assert "error: cannot write" in ran.stderr
    assert "what was measured is kept; go on with: vtune optimize --study s --out out" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert_no_server_is_left(tmp_path)
    (tmp_path / "out" / "trials").unlink()
    resumed = run("resume", "--trials", "1")
    assert resumed.returncode == 0, resumed.stderr
    assert [r["status"] for r in launched(tmp_path)].count("measured") >= 1
