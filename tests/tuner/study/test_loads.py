"""Configs compared at several loads, against a formula in which speculation pays at a low rate only."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from analytic_target import AnalyticServer, AnalyticTarget
from in_a_browser import check_page, needs_a_browser
from llama_8b import CONFIG
from typer.testing import CliRunner

from loadgen.measure.record import Records
from loadgen.plan.workload import Schedule
from loadgen.target import StartFailed
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.report.facts import report_facts
from tuner.report.report import write_report
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import load_seconds
from tuner.study.loads import compare_loads
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench
from tuner.workers.storage import open_study
from vtune_cli import app

CROSSING = 2.0
"""Requests/s at which speculation is worth nothing."""


class Speculating(AnalyticTarget):
    """Every 20th gap is (rate / CROSSING) ** 0.5 as long with speculation."""

    name = "speculating"

    @contextmanager
    def open(self, config: Any) -> Iterator[AnalyticServer]:
        with super().open(config) as server:
            yield Server(self, server.config)


class Server(AnalyticServer):
    def run(
        self, schedule: Schedule, progress: Any = None, stop: Any = None, **limits: float | None
    ) -> Records:
        rate = schedule.concurrency or len(schedule.requests) / load_seconds(schedule)
        factor = (rate / CROSSING) ** 0.5 if self.config.get("speculative_config") else 1.0
        self.target.itl_factor = lambda config, seed: factor
        return super().run(schedule, progress, stop)


class Notebook(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def study(out: Path, target: AnalyticTarget, **job: Any) -> tuple[Optimizer, Any]:
    """At the peak, where a smaller budget without speculation is best."""
    knobs = {"max_num_batched_tokens": (512,), "speculative_config": None}
    options = {"budget": None, "trials": 4, "run_seconds": 30.0, "pairs": 2, "rate": 8.0, **job}
    asked = Job(**{"slo": "itl", "fix": ("all",), "vary": knobs, "loads": (0.5, 8.0), **options})
    record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo(asked.slo).objective)
    optimizer = Optimizer(asked, Bench(target, Notebook(), Interrupts(), out), record)
    return optimizer, optimizer.run()


def drafts(flags: Any) -> int:
    return int((flags.get("speculative_config") or {}).get("num_speculative_tokens", 0))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Optimizer, Any]:
    return study(tmp_path_factory.mktemp("loads"), Speculating())


def test_speculation_is_advised_below_the_crossing(done: tuple[Optimizer, Any]) -> None:
    optimizer, outcome = done
    advice = compare_loads(optimizer, outcome)
    assert advice is not None
    assert [drafts(advice.curves[regime.best].flags) > 0 for regime in advice.regimes] == [True, False]
    edge = advice.regimes[0].crossing
    assert edge is not None
    assert edge.low <= edge.at <= edge.high
    assert edge.at == pytest.approx(CROSSING, rel=0.2)
    assert advice.sentence.startswith(
        f"By ITL ES99, the best config depends on the load: up to {edge.at:.3g} req/s"
    )
    assert advice.sentence.endswith("above it no speculation")
    assert not any(curve.predicted for curve in advice.curves)


def test_the_report_shows_the_crossing_and_the_terminal_says_it(done: tuple[Optimizer, Any]) -> None:
    optimizer, outcome = done
    advice = compare_loads(optimizer, outcome)
    facts = report_facts(optimizer, outcome, advice)
    assert advice is not None
    assert advice.sentence in facts.lines
    texts = {path.suffix: path.read_text() for path in write_report(facts)}
    data = json.loads(texts[".json"])["advice"]
    assert data["regimes"][0]["from"] == 0
    assert data["regimes"][0]["to"] == data["regimes"][1]["from"]
    assert data["regimes"][1]["to"] is None
    assert data["loads"] == [0.5, 8.0]
    for suffix in (".md", ".html"):
        assert advice.sentence in texts[suffix]


@needs_a_browser
def test_a_browser_draws_the_whole_report(done: tuple[Optimizer, Any], tmp_path: Path) -> None:
    optimizer, outcome = done
    advice = compare_loads(optimizer, outcome)
    facts = report_facts(optimizer, outcome, advice)
    write_report(replace(facts, out=tmp_path))
    shown = check_page(tmp_path / "report.html", at_least=6)
    assert "By load" in shown


def test_simulation_chooses_what_is_measured(done: tuple[Optimizer, Any], tmp_path: Path) -> None:
    """The prior knows the crossing, so that only what it advises somewhere and the baseline are measured."""
    optimizer, outcome = done
    target = Speculating()
    optimizer = replace_bench(optimizer, target, simulator=Speculating)
    advice = compare_loads(optimizer, outcome)
    assert advice is not None
    assert len(target.opened) <= 3
    measured = [curve for curve in advice.curves if not curve.predicted]
    assert 2 <= len(measured) <= 3
    assert any(curve.predicted for curve in advice.curves)
    assert "predicted by speculating" in advice.note
    assert [drafts(advice.curves[regime.best].flags) > 0 for regime in advice.regimes] == [True, False]


def test_without_time_left_it_is_predicted_and_says_so(done: tuple[Optimizer, Any]) -> None:
    optimizer, outcome = done
    target = Speculating()
    optimizer = replace_bench(optimizer, target, simulator=Speculating)
    optimizer.job = replace(optimizer.job, budget=1e-3)
    advice = compare_loads(optimizer, outcome)
    assert advice is not None
    assert target.opened == []
    assert advice.sentence.startswith("PREDICTED by speculating, not measured: By ITL ES99")
    optimizer.simulator = lambda: None
    assert compare_loads(optimizer, outcome) is None, "nothing measured and nothing simulated"


def replace_bench(optimizer: Optimizer, target: AnalyticTarget, simulator: Any) -> Optimizer:
    """The same study, to be measured on ``target``."""
    changed = copy.copy(optimizer)
    changed.bench = Bench(target, Notebook(), Interrupts(), optimizer.bench.out)
    changed.simulator = simulator
    return changed


def test_a_config_that_does_not_come_up_is_advised_nowhere(done: tuple[Optimizer, Any]) -> None:
    def fault(config: Any) -> None:
        if config.get("speculative_config"):
            raise StartFailed("out_of_memory", "no room for drafts", "")

    optimizer, outcome = done
    advice = compare_loads(replace_bench(optimizer, Speculating(fault), lambda: None), outcome)
    assert advice is not None
    assert [drafts(advice.curves[regime.best].flags) for regime in advice.regimes] == [0]


def test_an_interrupt_keeps_what_was_measured(done: tuple[Optimizer, Any]) -> None:
    class Interrupted(Speculating):
        def open(self, config: Any) -> Any:
            if len(self.opened) == 2:
                raise KeyboardInterrupt
            return super().open(config)

    optimizer, outcome = done
    advice = compare_loads(replace_bench(optimizer, Interrupted(), lambda: None), outcome)
    assert advice is not None
    assert len(advice.curves) == 2


@pytest.mark.parametrize("loads", [(), None])
def test_without_loads_nothing_is_compared(loads: Any, done: tuple[Optimizer, Any]) -> None:
    optimizer, outcome = done
    changed = copy.copy(optimizer)
    changed.load_selection = replace(optimizer.load_selection, job=replace(optimizer.job, loads=loads))
    assert compare_loads(changed, outcome) is None


def test_the_plan_keeps_time_for_the_loads(tmp_path: Path) -> None:
    optimizer, _ = study(tmp_path, Speculating(), budget=2000.0, trials=1)
    assert optimizer.plan is not None
    assert 0 < optimizer.plan.loads_seconds <= 500
    assert "for other loads" in optimizer.plan.describe()
    without = replace(optimizer.plan, loads_seconds=0.0)
    kept = without.search_seconds - optimizer.plan.search_seconds
    assert kept == pytest.approx(optimizer.plan.loads_seconds)


# Through the command.


def optimize(*words: str) -> Any:
    return CliRunner().invoke(app, ["optimize", *words])


def test_the_hours_of_a_trace(tmp_path: Path) -> None:
    """Quiet and busy minutes: each part of the trace has its rate and what is advised for it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lines, at = ["Timestamp,Request tokens,Response tokens"], 0.0
    while at < 120:
        lines.append(f"{at:.3f},{200 if at % 7 > 1 else 6000},16")
        at += 0.05 if 40 <= at < 80 else 0.4
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    result = optimize(
        *("--replay", str(tmp_path / "t.csv"), "--target", "simulated:h100"),
        *(
            "--model",
            str(tmp_path / "config.json"),
            "--slo",
            "itl_es99<300ms",
            "--trials",
            "1",
            "--pairs",
            "2",
        ),
        *("--fix", "all", "--vary", "max_num_batched_tokens=2048", "--run-time", "10s"),
        *("--out", str(tmp_path / "out")),
    )
    assert result.exit_code == 0, result.output
    advice = json.loads((tmp_path / "out" / "report.json").read_text())["advice"]
    assert advice is not None, result.output
    assert advice["loads"] == [2.5, 20.0]
    assert advice["unit"] == "req/s"
    rates = [hour["rate"] for hour in advice["hours"]]
    assert rates == pytest.approx([2.5, 2.5, 20, 20, 2.5, 2.5], rel=0.2)
    assert "every load tried" in result.output or "depends on the load" in result.output


@pytest.mark.parametrize("loads", ["2", "2,2", "0,4", "a,b", "4,inf"])
def test_loads_that_are_none_are_refused(loads: str) -> None:
    result = optimize("--loads", loads)
    assert result.exit_code == 2
    assert "give two levels or more" in " ".join(result.output.split())
