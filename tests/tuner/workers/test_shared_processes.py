"""One study, several processes of ``vtune optimize``: of ``--workers``, and two that share a PostgreSQL."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vtune_process
from postgres import postgres, reason_to_skip
from vtune_process import FAKE, Vtune, assert_no_server_is_left, wait_for

pytestmark = pytest.mark.timeout(600)
TRIALS = 2
WRAPPER = """
import os, sys
with open("devices", "a") as file:
    file.write(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + "\\n")
os.execv(sys.executable, [sys.executable, "-S", *sys.argv[1:]])
"""
"""Starts the fake server, and writes down which GPUs it would see."""


class Processes:
    """``vtune optimize`` in ``place``, by name."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.started: dict[str, Vtune] = {}
        (place / "wrapper.py").write_text(WRAPPER)

    def start(
        self, name: str, *arguments: str, rate: int = 25, run_time: str = "1s", **environment: str
    ) -> Vtune:
        words = [sys.executable, "-S", "wrapper.py", str(FAKE), "fake", "--time-scale", "0.2"]
        whole = [
            "optimize", "--study", "s", "--out", "out", "--workload", "random", "--strategy", "random",
            "--target", f"{shlex.join(words)} {{flags}} --port {{port}}", "--slo", "ttft_es95<60s",
            "--rate", str(rate), "--run-time", run_time, "--trials", str(TRIALS), "--pairs", "2", *arguments,
        ]  # fmt: skip
        self.started[name] = Vtune(self.place, *whole, name=name, environment=environment)
        return self.started[name]

    def wait_for(self, name: str, text: str, times: int = 1) -> None:
        wait_for(self.started[name].err, text, times)

    def finish(self, name: str) -> int:
        return self.started[name].wait()

    def said(self, name: str) -> str:
        return self.started[name].stdout

    def noted(self, name: str) -> str:
        return self.started[name].stderr

    def end(self) -> None:
        for process in self.started.values():
            process.kill()


@pytest.fixture
def vtune(tmp_path: Path) -> Iterator[Processes]:
    processes = Processes(tmp_path)
    yield processes
    processes.end()


def assert_each_config_was_measured_once(url: str) -> list[dict[str, Any]]:
    """The workers of the trials that were launched."""
    launched = vtune_process.launched(url)
    configs = [json.dumps(result["config"], sort_keys=True) for result in launched]
    assert len(set(configs)) == len(configs) == 1 + TRIALS
    told = vtune_process.trials(url)
    assert not [trial.number for trial in told if trial.state.name == "RUNNING"]
    numbers = {result["number"] for result in launched}
    return [trial.user_attrs["worker"] for trial in told if trial.number in numbers]


def test_workers_of_one_machine_have_a_gpu_each_and_one_verdict(vtune: Processes, tmp_path: Path) -> None:
    vtune.start("boss", "--workers", "2", rate=50, run_time="0.5s", CUDA_VISIBLE_DEVICES="4,7")
    assert vtune.finish("boss") == 0, vtune.noted("boss")
    workers = assert_each_config_was_measured_once(f"sqlite:///{tmp_path / 'out' / 'study.db'}")
    seen = set((tmp_path / "devices").read_text().split())
    assert {worker["devices"] for worker in workers} <= seen <= {"4", "7"}, "one may do nothing but confirm"
    assert len(vtune.said("boss").splitlines()) in (1, 3), "a verdict, and how to launch it and go back"
    verdict = vtune.said("boss").splitlines()[0]
    for name in ("worker-1", "worker-2"):
        assert f"{name}: {verdict}" in vtune.noted("boss")
    assert_no_server_is_left(tmp_path)


def test_ctrl_c_ends_every_worker_and_the_study_goes_on(vtune: Processes, tmp_path: Path) -> None:
    boss = vtune.start("boss", "--workers", "2", CUDA_VISIBLE_DEVICES="0,1")
    vtune.wait_for("boss", "  load, ", times=2)
    boss.send_signal(signal.SIGINT)
    assert vtune.finish("boss") == 130
    assert "go on with: vtune optimize --study s --out out --workers 2" in vtune.noted("boss")
    assert "Traceback" not in vtune.noted("boss")
    assert_no_server_is_left(tmp_path)
    url = f"sqlite:///{tmp_path / 'out' / 'study.db'}"
    assert not [trial for trial in vtune_process.trials(url) if trial.state.name == "RUNNING"]
    vtune.start("again", "--workers", "2", CUDA_VISIBLE_DEVICES="0,1")
    assert vtune.finish("again") == 0, vtune.noted("again")
    assert_each_config_was_measured_once(url)


@pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())
def test_ctrl_c_in_one_of_two_processes_on_postgres(vtune: Processes, tmp_path: Path) -> None:
    with postgres() as server:
        server.create("vtune")
        url = server.url_of("vtune")
        first = vtune.start("first", VTUNE_STORAGE=url)
        vtune.start("second", VTUNE_STORAGE=url)
        vtune.wait_for("first", "  load, ")
        first.send_signal(signal.SIGINT)
        assert vtune.finish("first") == 130, vtune.noted("first")
        assert vtune.finish("second") == 0, vtune.noted("second")
        pids = {worker["pid"] for worker in assert_each_config_was_measured_once(url)}
        assert vtune.started["second"].pid in pids
        assert "Traceback" not in vtune.noted("first") + vtune.noted("second")
        assert "died" not in vtune.noted("second"), "it gave its trial back"
        vtune.start("late", VTUNE_STORAGE=url)
        assert vtune.finish("late") == 0
        assert vtune.said("late") == vtune.said("second")
        assert "starting the server" not in vtune.noted("late")
    assert_no_server_is_left(tmp_path)
