"""Workers as forked processes, each with the same job on an analytic target, and what became of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import psutil
import scipy.stats  # noqa: F401 - here, and not in every fork
import sqlalchemy
from analytic_target import AnalyticTarget

import tuner.report.study_result as study_result_module
import tuner.study.trial as trial_module
from loadgen.target import OpenTarget
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.interrupts import Interrupts
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench
from tuner.workers.coordination import SharedCoordination
from tuner.workers.machine import Machine
from tuner.workers.storage import Heartbeat, RetryPolicy, open_storage, open_study

HEARTBEAT = Heartbeat(interval=0.1, grace=600.0)
"""However slowly a machine's tests run, no worker is taken for dead but by :meth:`WorkerProcesses.bury`."""
JOB = Job(rate=1.0, budget=None, trials=4, run_seconds=20.0, pairs=4, strategy="random", prior="none")
optuna.storages.RDBStorage("sqlite://").engine.dispose()  # sets up what every fork then has
FORK = multiprocessing.get_context("fork")
PATIENCE_SECONDS = 540.0
"""Of a machine that is busy with other things."""


class Diary(Observer):
    """Writes down what it is told, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, text: str) -> None:
        with open(self._path, "a") as file:
            file.write(text + "\n")


class Victim(AnalyticTarget):
    """Comes to a halt in the first load that ``halts`` picks, until ``marker``, which says so, is removed."""

    def __init__(self, marker: Path, halts: Callable[[Mapping[str, Any]], bool], **options: Any) -> None:
        super().__init__(run_fault=self._halt, **options)
        self._marker, self._halts, self._halted = marker, halts, False

    def _halt(self, config: Mapping[str, Any]) -> None:
        if self._halts(config) and not self._halted:
            self._halted = True
            self._marker.write_text(json.dumps(dict(config)))
            while self._marker.exists():
                time.sleep(0.02)


class WorkerProcesses:
    """Starts workers of one study in ``place``."""

    def __init__(self, place: Path, url: str, job: Job = JOB) -> None:
        self.place, self.url, self.job = place, url, job
        self.workers: dict[str, Any] = {}

    def start(self, name: str, target: OpenTarget | None = None, hardware: str = "a card") -> Any:
        process = FORK.Process(target=self._work, args=(name, target or AnalyticTarget(), hardware))
        process.start()
        self.workers[name] = process
        return process

    def _work(self, name: str, target: Any, hardware: str) -> None:
        out = self.place / name
        out.mkdir()
        storage = open_storage(self.url, HEARTBEAT, RetryPolicy(seconds=60.0, pause=0.05, longest_pause=0.2))
        record = open_study(storage, "s", parse_slo(self.job.slo).objective)
        diary = Diary(out / "diary")
        stubs: tuple[tuple[Any, str, Any], ...] = (
            (study_result_module, "conclude", without_report),
            (trial_module, "examine", unexamined),
        )
        for module, function, stub in stubs:
            setattr(module, function, stub)
        machine = Machine(f"host-{name}", os.getpid(), hardware)
        storage.retry = replace(storage.retry, notify=diary.note)
        with SharedCoordination(storage, record, machine, diary.note, poll=0.05) as coordination:
            optimizer = Optimizer(self.job, Bench(target, diary, Interrupts(), out), record, coordination)
            result = study_result_module.finish_study(optimizer)
        (out / "verdict").write_text("\n".join(result.lines))
        (out / "opened").write_text(str(len(target.opened)))

    def finish(self, *names: str) -> None:
        """Wait for the workers of these names, or for all."""
        for name in names or tuple(self.workers):
            self.workers[name].join(PATIENCE_SECONDS)
            assert self.workers[name].exitcode == 0, (name, self.workers[name].exitcode, self.diary(name))

    def kill(self, name: str) -> None:
        os.kill(self.workers[name].pid, signal.SIGKILL)
        self.workers[name].join()

    def freeze(self, name: str) -> None:
        """Stop a worker of PostgreSQL, but in no transaction: what it had locked would stay so."""
        process = psutil.Process(self.workers[name].pid)
        storage = optuna.storages.RDBStorage(self.url)
        transactions = sqlalchemy.text(
            "SELECT count(xact_start) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        try:
            while True:
                process.suspend()
                while process.status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
                with storage.engine.connect() as connection:
                    if connection.execute(transactions).scalar() == 0:
                        return
                process.resume()
                time.sleep(0.01)
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def bury(self, name: str) -> None:
        """Let the last heartbeat of a worker that is killed or stopped be an hour ago."""
        storage = optuna.storages.RDBStorage(self.url)
        try:
            desk = optuna.load_study(study_name="s/workers", storage=storage)
            study_id = storage.get_study_id_from_name("s/workers")
            numbers = [t.number for t in desk.trials if t.user_attrs["host"] == f"host-{name}"]
            pulses = [storage.get_trial_id_from_study_id_trial_number(study_id, n) for n in numbers]
            past = (
                "UPDATE trial_heartbeats SET heartbeat = heartbeat - INTERVAL '1 hour' WHERE trial_id = :id"
            )
            with storage.engine.begin() as connection:
                for trial_id in pulses:
                    connection.execute(sqlalchemy.text(past), {"id": trial_id})
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def end(self) -> None:
        for worker in self.workers.values():
            if worker.is_alive():
                worker.kill()
            worker.join()

    def wait_for(self, name: str, text: str) -> None:
        """Until a worker has noted ``text``."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while text not in self.diary(name):
            assert time.monotonic() < deadline, f"{text!r} is not in:\n{self.diary(name)}"
            time.sleep(0.02)

    def diary(self, name: str) -> str:
        path = self.place / name / "diary"
        return path.read_text() if path.exists() else ""

    def verdicts(self) -> set[str]:
        return {path.read_text() for path in self.place.glob("*/verdict")}

    def confirmers(self) -> list[str]:
        return [path.parent.name for path in self.place.glob("*/confirmation")]

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        storage = optuna.storages.RDBStorage(self.url)
        try:
            return optuna.load_study(study_name="s", storage=storage).trials
        finally:
            storage.remove_session()
            storage.engine.dispose()

    def launched(self) -> list[dict[str, Any]]:
        told = [t.user_attrs["result"] for t in self.trials() if "result" in t.user_attrs]
        return [r for r in told if r["status"] in ("measured", "stopped", "failed")]

    def assert_each_config_was_measured_once(self, trials: int) -> None:
        launched = self.launched()
        configs = [json.dumps(r["config"], sort_keys=True) for r in launched]
        assert len(set(configs)) == len(configs)
        assert [r["origin"] for r in launched].count("baseline") == 1
        assert len(launched) == 1 + trials
        assert not [t.number for t in self.trials() if t.state.name == "RUNNING"]


def unexamined(*_: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What :func:`tuner.runs.findings.examine` returns for a trial of which the doctor finds nothing."""
    return (), ()


def without_report(optimizer: Optimizer, outcome: Any, advice: Any) -> Any:
    """What :func:`tuner.report.study_result.conclude` returns, without a report's charts."""
    return study_result_module.StudyResult(
        0, (outcome.sentence,), "{}", files=(), launched=optimizer.launched()
    )


def wait_for(path: Path, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)
