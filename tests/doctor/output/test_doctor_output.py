"""Markdown, JUnit, the live view, and windows gone by."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from exporter import Exporter, serve
from synthetic_server import Server
from typer.testing import CliRunner, Result

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.finding import Diagnosis
from doctor.diagnosis.playbook import load_all
from doctor.metrics.period import moment, period
from doctor.metrics.sources import MetricsUrl, Scrapes
from doctor.output.junit import as_junit
from doctor.output.markdown import as_markdown
from doctor.output.report import as_text
from doctor.output.watch import CLEAR, RollingMetrics, line, screen, watch
from servers.errors import SourceError
from vtune_cli import app

CAPPED = Server(running=2, waiting=9, kv=0.02)
FLAGS = ("--flags", "vllm serve m --max-num-seqs 2")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.fixture
def incident(tmp_path: Path) -> str:
    """Twenty minutes of health, then ten of a sequence cap; it ends at 2023-11-14T22:43:00Z."""
    well, sick = Server(), replace(CAPPED)
    pages = [well.page(n, 0.0) for n in range(1, 121)] + [sick.page(n, 0.0) for n in range(121, 181)]
    last = 1_700_001_780_000
    lines = [f"# scrape_unix_ms {last - 10_000 * (179 - n)}\n{page}" for n, page in enumerate(pages)]
    path = tmp_path / "incident.prom"
    path.write_text("".join(lines))
    return str(path)


def test_markdown_has_figures_queries_and_cure(incident: str) -> None:
    text = run("doctor", "--series", incident, "--since", "-5m", *FLAGS, "--format", "markdown").stdout
    assert "## 1. warning: Requests wait although the KV pool is free" in text
    assert "| waiting_share | 100 % |" in text
    assert "- try: --max-num-seqs 16" in text
    assert re.search(
        r"Impact: about [\d.]+ s extra latency per request \(9 requests delayed on average\)", text
    )
    assert "## Cannot tell" in text
    assert (
        "avg_over_time"
        not in run("doctor", "--series", incident, "--format", "markdown", "--no-queries").stdout
    )


def test_junit_has_a_case_a_symptom(incident: str) -> None:
    document = run("doctor", "--series", incident, "--since", "-5m", *FLAGS, "--format", "junit").stdout
    (suite,) = ElementTree.fromstring(document.encode())
    cases = {case.get("name"): case for case in suite}
    assert cases.keys() == {book.id for book in load_all() if book.when.parts}
    failed = [name for name, case in cases.items() if case.find("failure") is not None]
    assert failed == ["seq-cap"]
    assert suite.get("failures") == "1"
    assert "--max-num-seqs 16" in str(cases["seq-cap"].findtext("failure"))
    assert cases["kv-idle"].find("system-out") is not None
    skipped = cases["prefix-misses"].find("skipped")
    assert skipped is not None
    assert "--assume shared-prefix" in str(skipped.get("message"))


def test_junit_fails_at_the_gate_s_own_severity(incident: str) -> None:
    arguments = ("doctor", "--series", incident, "--since", "-5m", *FLAGS, "--format", "junit")
    (suite,) = ElementTree.fromstring(run(*arguments, "--fail-on", "critical").stdout.encode())
    assert suite.get("failures") == "0"


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        (["--until", "-11m"], []),
        (["--since", "-5m"], ["seq-cap", "kv-idle"]),
        (["--since", "2023-11-14T22:15:00Z", "--until", "2023-11-14T22:30:00+00:00"], []),
        (["--since", "22:34Z"], ["seq-cap", "kv-idle"]),
        (["--since", "1700001300", "--until", "1700001780"], ["seq-cap", "kv-idle"]),
    ],
)
def test_a_part_of_a_recording_is_judged_alone(incident: str, bounds: list[str], found: list[str]) -> None:
    document = json.loads(run("doctor", "--series", incident, *bounds, *FLAGS, "--format", "json").stdout)
    assert [finding["id"] for finding in document["findings"]] == found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--since", "yesterday"], "--since yesterday: write 14:05"),
        (["--since", "2024-01-01T00:00:00Z"], "must lie before --until"),
        (["--until", "2020-01-01T00:00:00Z"], "the recording goes from 2023-11-14T22:13:10+00:00"),
        (["--watch", "--format", "junit"], "--watch writes text or json"),
        (["--watch", "--interval", "often"], "--interval often: write a duration"),
    ],
)
def test_wrong_windows_are_said_in_words(incident: str, arguments: list[str], complaint: str) -> None:
    result = run("doctor", "--series", incident, *arguments)
    assert (result.exit_code, complaint in result.stderr) == (2, True)


def test_the_past_of_a_live_page_is_gone() -> None:
    result = run("doctor", "--metrics", "http://127.0.0.1:9", "--since", "-5m")
    assert (result.exit_code, "need --prometheus URL or --series FILE" in result.stderr) == (2, True)


def test_a_time_of_day_is_the_last_such_time() -> None:
    end = datetime.fromisoformat("2026-03-02T01:00:00+00:00").timestamp()
    assert moment("9:30Z", "--since").resolve(end) == end - 15.5 * 3600
    window = period("23:50Z", "-10m")
    assert window is not None
    assert window.bounds(end) == (end - 70 * 60, end - 10 * 60)


def stopping(after: int) -> Callable[[float], None]:
    """A sleep that is interrupted."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == after:
            raise KeyboardInterrupt

    return sleep


def test_watching_judges_until_it_is_interrupted() -> None:
    answers: list[Any] = [Server(), SourceError("gone"), CAPPED]
    shown: list[Diagnosis | SourceError] = []

    def judge() -> Diagnosis:
        answer = answers.pop(0)
        if isinstance(answer, SourceError):
            raise answer
        return diagnose(Scrapes(answer.scrapes(), "a:1"), {"max_num_seqs": 2})

    last = watch(judge, shown.append, 2.0, stopping(3))
    assert last is shown[-1]
    at = datetime(2026, 1, 1, 14, 5)
    assert [line(seen, at) for seen in shown] == [
        "14:05:00 Healthy: every objective is held, and nothing is at severity warning or above.",
        "14:05:00 cannot look: gone",
        "14:05:00 warning seq-cap on a:1",
    ]
    assert screen(shown[-1], at).startswith(CLEAR + "14:05:00")
    assert "cannot look: gone" in screen(shown[1], at)


def test_watching_what_never_answered_fails() -> None:
    def judge() -> Diagnosis:
        raise SourceError("nobody there")

    with pytest.raises(SourceError, match="nobody there"):
        watch(judge, print, 1.0, stopping(1))


def test_a_watched_page_keeps_the_window_and_no_more() -> None:
    pages = [Server().page(number, 0.0) for number in range(1, 9)]
    with serve(Exporter(pages)) as server:
        source = RollingMetrics(MetricsUrl(server.address, interval=0.01))
        first = source.observe(60.0, {"slo_ttft_p95": 2.0, "slo_itl_p99": 0.2})
        assert (server.served, first.window_s > 0) == (2, True)
        for _ in range(3):
            source.observe(1e-6, {"slo_ttft_p95": 2.0, "slo_itl_p99": 0.2})
        assert server.served == 5
        assert len(source._scrapes) == 2


def test_ctrl_c_ends_the_live_view_as_a_command_that_went_well() -> None:
    pages = [CAPPED.page(number, 0.0) for number in range(1, 1000)]
    code = "from vtune_cli import app; app()"
    with serve(Exporter(pages)) as server:
        command = [sys.executable, "-c", code, "doctor", "--metrics", server.address]
        process = subprocess.Popen(
            [*command, "--watch", "--interval", "0.2s", *FLAGS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=240)
    assert all("warning seq-cap on 127.0.0.1" in text for text in lines), lines
    assert (process.returncode, complaint) == (0, "")


def test_what_a_server_calls_itself_is_shown_as_text() -> None:
    name = "a\x1b[2J`<img>|\n:1"
    diagnosis = diagnose(Scrapes(CAPPED.scrapes(), name), {"max_num_seqs": 2})
    shown = as_text(diagnosis)
    assert shown.splitlines()[0].startswith(r"a\x1b[2J`<img>|\n:1: ")
    page = as_markdown(diagnosis)
    assert page.splitlines()[0] == r"# Diagnosis of a\\x1b\[2J\`&lt;img>\| :1"
    assert "\x1b" not in shown + page + as_junit(diagnosis, load_all())
    assert "\x1b" not in line(diagnosis, datetime(2026, 1, 1)) + line(SourceError(name), datetime(2026, 1, 1))
