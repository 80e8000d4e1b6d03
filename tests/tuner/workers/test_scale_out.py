"""Workers that share a study: in an SQLite file, and in a real PostgreSQL that is restarted under them."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from analytic_target import AnalyticTarget
from postgres import postgres, reason_to_skip
from worker_processes import Victim, WorkerProcesses, wait_for

pytestmark = pytest.mark.timeout(600)
WITH_POSTGRES = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())


def any_load(config: Any) -> bool:
    return True


def not_the_baseline(config: Any) -> bool:
    return config["max_num_batched_tokens"] != 2048


def slow(config: Any) -> None:
    """A load takes long enough for workers to be at work at the same time."""
    time.sleep(0.03)


@pytest.fixture(scope="module")
def database() -> Iterator[Any]:
    with postgres() as server:
        yield server


@pytest.fixture
def processes_in(tmp_path: Path) -> Iterator[Any]:
    started = []

    def make(url: str, **options: Any) -> Any:
        started.append(WorkerProcesses(tmp_path / "workers", url, **options))
        (tmp_path / "workers").mkdir()
        return started[-1]

    yield make
    for processes in started:
        processes.end()


@pytest.fixture
def fresh(database: Any) -> Any:
    """The URL of an empty database."""
    name = f"test_{os.urandom(4).hex()}"
    database.create(name)
    return database.url_of(name)


@WITH_POSTGRES
def test_four_workers_measure_each_config_once_and_agree(processes_in: Any, fresh: Any) -> None:
    processes = processes_in(fresh)
    for number in range(4):
        processes.start(f"w{number}", AnalyticTarget(run_fault=slow))
    processes.finish()
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1
    assert "confirmed on fresh runs" in processes.verdicts().pop()
    assert len(processes.confirmers()) == 1
    hosts = {t.user_attrs["worker"]["host"] for t in processes.trials() if "config" in t.user_attrs}
    assert hosts <= {f"host-w{number}" for number in range(4)}


@WITH_POSTGRES
def test_what_a_killed_worker_was_measuring_is_measured_elsewhere(
    processes_in: Any, fresh: Any, tmp_path: Path
) -> None:
    processes = processes_in(fresh)
    processes.start("victim", Victim(tmp_path / "halted", not_the_baseline))
    wait_for(tmp_path / "halted")
    processes.kill("victim")
    processes.bury("victim")
    for number in range(3):
        processes.start(f"w{number}")
    processes.finish("w0", "w1", "w2")
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1
    again = [t for t in processes.trials() if t.user_attrs.get("deaths")]
    assert [t.user_attrs["deaths"] for t in again] == [1]
    lost = [t for t in processes.trials() if t.state.name == "FAIL"]
    assert lost[0].user_attrs["config"] == again[0].user_attrs["config"]
    assert lost[0].user_attrs["worker"]["host"] == "host-victim"
    assert again[0].user_attrs["worker"]["host"] != "host-victim"
    assert "1 trial(s) whose worker died" in "".join(processes.diary(f"w{number}") for number in range(3))


@WITH_POSTGRES
def test_a_baseline_whose_worker_died_is_measured_by_one_of_those_that_wait(
    processes_in: Any, fresh: Any, tmp_path: Path
) -> None:
    processes = processes_in(fresh)
    processes.start("victim", Victim(tmp_path / "halted", any_load))
    wait_for(tmp_path / "halted")
    processes.start("w0")
    processes.start("w1")
    processes.wait_for("w1", "baseline: left to the worker on host-victim")
    processes.kill("victim")
    processes.bury("victim")
    processes.finish("w0", "w1")
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1


@WITH_POSTGRES
def test_workers_outlast_a_database_that_restarts(
    processes_in: Any, fresh: Any, database: Any, tmp_path: Path
) -> None:
    processes = processes_in(fresh)
    processes.start("halted", Victim(tmp_path / "halted", not_the_baseline))
    wait_for(tmp_path / "halted")
    processes.start("w0", Victim(tmp_path / "w0-halted", not_the_baseline))
    wait_for(tmp_path / "w0-halted")
    database.stop()
    for marker in ("halted", "w0-halted"):  # both come to their ends while there is no database
        (tmp_path / marker).unlink()
    for name in processes.workers:
        processes.wait_for(name, "does not answer")
    database.start()
    processes.finish()
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1
    assert "the database answers again" in processes.diary("w0")


@WITH_POSTGRES
def test_one_that_was_taken_for_dead_goes_on_and_nothing_counts_twice(
    processes_in: Any, fresh: Any, tmp_path: Path
) -> None:
    processes = processes_in(fresh)
    sleeper = processes.start("sleeper", Victim(tmp_path / "halted", not_the_baseline))
    wait_for(tmp_path / "halted")
    processes.freeze("sleeper")
    processes.bury("sleeper")
    processes.start("w0")
    processes.finish("w0")
    (tmp_path / "halted").unlink()
    os.kill(sleeper.pid, signal.SIGCONT)
    processes.finish("sleeper")
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1
    assert "took this one for dead" in processes.diary("sleeper")


def test_two_workers_started_at_once_on_one_machine(processes_in: Any, tmp_path: Path) -> None:
    processes = processes_in(f"sqlite:///{tmp_path / 'study.db'}")
    for number in range(2):
        processes.start(f"w{number}", AnalyticTarget(run_fault=slow))
    processes.finish()
    processes.assert_each_config_was_measured_once(trials=4)
    assert len(processes.verdicts()) == 1
    assert len(processes.confirmers()) == 1


def test_who_comes_after_the_end_sees_the_verdict_and_starts_no_server(
    processes_in: Any, tmp_path: Path
) -> None:
    processes = processes_in(f"sqlite:///{tmp_path / 'study.db'}")
    processes.start("w0")
    processes.finish("w0")
    processes.start("late")
    processes.finish("late")
    assert (processes.place / "late" / "opened").read_text() == "0"
    assert len(processes.verdicts()) == 1


def test_machines_that_differ_are_warned_of(processes_in: Any, tmp_path: Path) -> None:
    processes = processes_in(f"sqlite:///{tmp_path / 'study.db'}")
    processes.start("w0", hardware="1 x H100")
    processes.finish("w0")
    processes.start("w1", hardware="1 x A100")
    processes.finish("w1")
    assert "the workers' machines differ (1 x A100; 1 x H100)" in processes.diary("w1")
    assert "differ" not in processes.diary("w0")
