"""A server that is somebody else's: what it is sent, what is asked before more, and when that ends."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.plan.workload import preset
from loadgen.target import OpenTarget
from loadgen.targets.server import ServerTarget
from servers.connection import Connection
from servers.metrics.page import PageReader
from servers.slo.objective import parse_slo
from tuner.command import _permit_load
from tuner.job.job import UsageError
from tuner.job.options import Options, Place
from tuner.runs.findings import TrialFinding
from tuner.runs.load import GeneratedLoad
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.session.new_job import requested_job
from tuner.session.session import StudySession
from tuner.study.outcome import as_it_runs
from tuner.study.running_server import SMALL_PROMPT, SMALL_REQUESTS, StatedLoad, most_requests, small_scale
from vtune_cli import app

FAKE = Path(__file__).parents[2] / "fake_server.py"
STATED = re.compile(r"(?:will|would) (?:send|be sent) .*?(?:up to|about) (\d+) requests")


@pytest.fixture(autouse=True)
def back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def serving(tmp_path: Path, *arguments: str) -> Iterator[OpenTarget]:
    command = shlex.join([sys.executable, "-S", str(FAKE), "m", *arguments])
    with ServerTarget(f"{command} {{flags}}", log_dir=tmp_path / "logs").open({}) as server:
        yield server


def received(server: OpenTarget) -> int:
    """Requests that the server answered or that were given up; the first one is the test's own."""
    page = PageReader(("finished", "running", "waiting")).read(server.scrape())
    return round(sum(page.samples.values())) - 1


def optimize(server: OpenTarget, *options: str) -> Any:
    return CliRunner().invoke(app, ["optimize", "--target", server.url, "--out", "out", *options])


def report() -> dict[str, Any]:
    return dict(json.loads(Path("out/report.json").read_text()))


def test_a_small_load_is_stated_and_no_more_is_sent(tmp_path: Path) -> None:
    with serving(tmp_path, "--time-scale", "0.2") as server:
        result = optimize(server, "--run-time", "3s", "--workload", "random")
        sent = received(server)
    assert result.exit_code == 0, result.output
    stated = STATED.search(result.output)
    assert stated, result.output
    assert int(stated[1]) == SMALL_REQUESTS + 3  # with the first request and the warm-up
    assert "2 at a time, of about 256 prompt and 63 output tokens, over 3 s" in result.output
    assert result.output.index(stated[0]) < result.output.index("connecting to")
    assert 20 < sent <= int(stated[1])
    (trial,) = report()["trials"]
    assert trial["status"] == "measured"
    for name in ("capacity", "lone request", "single-request"):
        assert name not in result.output


def test_a_fast_server_uses_up_the_requests_and_the_figures_are_of_that_time() -> None:
    workload = preset("random", max_model_len=4096)
    load = GeneratedLoad(workload, 0, seconds=20.0, concurrency=2, most=most_requests(2, 20.0))
    (whole,) = load.rungs()
    assert (len(whole.requests), whole.duration) == (100, 20.0)


@pytest.mark.parametrize(
    "options",
    [
        ("--rate", "1"),
        ("--concurrency", "3"),
        ("--run-time", "21s"),
        ("--scale", "1"),
        ("--slo", "throughput", "--concurrency", "64"),
    ],
    ids=" ".join,
)
def test_more_needs_a_yes_where_nobody_can_be_asked(tmp_path: Path, options: tuple[str, ...]) -> None:
    with serving(tmp_path, "--max-model-len", "32768") as server:
        result = optimize(server, *options)
        sent = received(server)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"error: --target {server.url} would be sent" in said
    assert STATED.search(said)
    assert "Give --yes to send it" in said
    assert sent == 0
    assert not Path("out").exists()


def test_with_a_yes_it_is_sent(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        options = ("--concurrency", "4", "--run-time", "2s", "--workload", "random", "--yes")
        result = optimize(server, *options)
        sent = received(server)
    assert result.exit_code == 0, result.output
    stated = STATED.search(result.output)
    assert stated
    assert 0 < sent <= int(stated[1])


@pytest.mark.parametrize(("answer", "sent"), [("y\n", True), ("\n", False), ("no\n", False), ("", False)])
def test_on_a_terminal_it_is_asked(monkeypatch: pytest.MonkeyPatch, answer: str, sent: bool) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    options = Options(target="http://127.0.0.1:1", rate=5.0, run_time="20s")
    session, shown = StudySession.of(options), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=400)
    if sent:
        _permit_load(session, session.asked.job, console)
    else:
        with pytest.raises(UsageError, match="nothing was sent"):
            _permit_load(session, session.asked.job, console)
    assert "This would send http://127.0.0.1:1 about 103 requests, as they come" in shown.getvalue()


def test_a_queue_that_grows_stops_the_load(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-num-seqs", "1", "--time-scale", "2") as server:
        result = optimize(server, "--run-time", "20s", "--workload", "random")
        sent = received(server)
    assert result.exit_code == 0, result.output
    (trial,) = report()["trials"]
    assert trial["status"] == "stopped"
    assert trial["reason"] == "1 requests wait in the server's queue, 0 did before the load"
    assert f"stopped early: {trial['reason']}" in report()["sentence"]
    assert 0 < trial["measurement"]["window"] < 8.0
    assert trial["measurement"]["readings"]["completed"]["value"] > 0
    assert sent < 40


def test_errors_stop_the_load(tmp_path: Path) -> None:
    with serving(tmp_path, "--fault", "errors-mid-run:15", "--time-scale", "2") as server:
        result = optimize(server, "--workload", "random")
    assert result.exit_code == 0, result.output
    (trial,) = report()["trials"]
    assert trial["status"] == "stopped"
    assert re.fullmatch(r"\d+ requests failed", trial["reason"])
    assert 0 < trial["measurement"]["readings"]["completed"]["value"] < 15
    assert trial["measurement"]["window"] < 8.0


def test_errors_within_answers_stop_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--fault", "error-in-stream") as server:
        result = optimize(server, "--workload", "random", "--run-time", "5s")
    assert result.exit_code == 1
    assert "; none was answered" in result.output, "for errors, or for the queue of a busy machine"


def test_the_budget_cuts_the_load() -> None:
    job = requested_job(Options(target="http://h", budget="12s")).job
    assert (job.run_seconds, job.concurrency) == (12.0, 2)
    asked = requested_job(Options(target="http://h", budget="10m", run_time="1h", rate=3.0)).job
    assert (asked.run_seconds, asked.rate, asked.concurrency) == (600.0, 3.0, None)


def test_the_key_and_the_headers_are_the_sessions() -> None:
    place = Place(yes=True)
    session = StudySession.of(Options(target="http://h", place=place))
    keyed = Connection(api_key="k", headers=(("X-Team", "t"),))
    object.__setattr__(session.asked, "connection", keyed)
    target: Any = session.target(session.asked.job, Path("out"))
    assert target._http.connection == keyed


@pytest.mark.parametrize("context", [4096, 32768, 131072])
def test_prompts_of_a_preset_are_kept_short(context: int) -> None:
    workload = preset("mixed", max_model_len=context, scale=small_scale("mixed", context))
    longest = max(cls.prompt.high for cls in workload.classes)
    assert longest == pytest.approx(min(SMALL_PROMPT, 24000 * context / 32768), rel=0.01)
    load = GeneratedLoad(workload, 0, 20.0, concurrency=2, most=SMALL_REQUESTS)
    assert StatedLoad.of(load).small


def test_flags_that_are_assumed_are_said_to_be() -> None:
    measured = Measurement({"itl_es99": Reading(0.05)}, window=10.0)
    guess = TrialFinding("seq-cap", "warning", "Few", {}, ({"max_num_seqs": 64},), assumed=("max_num_seqs",))
    assert TrialFinding.from_json(json.loads(json.dumps(guess.__dict__))) == guess

    def sentence(finding: TrialFinding) -> str:
        told = TrialResult(0, {}, "baseline", "measured", measurement=measured, findings=(finding,))
        return as_it_runs(told, "http://h", parse_slo("itl"), "…").sentence

    assert "--max-num-seqs 64 (from values that are assumed, not known, of max_num_seqs" in sentence(guess)
    known = TrialFinding("seq-cap", "warning", "Few", {}, ({"max_num_seqs": 64},))
    assert "assumed" not in sentence(known)
