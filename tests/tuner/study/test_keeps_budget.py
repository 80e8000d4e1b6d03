"""``--budget`` on a virtual clock: costs that vary, slow starts, a server that hangs."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from analytic_target import AnalyticServer, AnalyticTarget

from loadgen.measure.record import Records
from loadgen.target import RunFailed
from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.interrupts import Interrupts
from tuner.space.space import config_key
from tuner.study.known_costs import KnownCosts
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import WATCHDOG_FACTOR, WATCHDOG_SECONDS, Bench
from tuner.workers.storage import open_study

HANGS = 4
"""Which launch does."""


class ClockedTarget(AnalyticTarget):
    """A start takes 3 to 15 s by config, a load up to a third more than it should, a hanging one as long as
    patience lasts."""

    def __init__(self, hangs: int = 0) -> None:
        super().__init__()
        self.seconds, self.hangs = 0.0, hangs

    def clock(self) -> float:
        return self.seconds

    @contextmanager
    def open(self, config: Any) -> Iterator[AnalyticServer]:
        with super().open(config) as server:
            server.start_seconds = 3.0 + zlib.crc32(config_key(config).encode()) % 13
            self.seconds += server.start_seconds
            yield ClockedServer(self, server.config, server.start_seconds, len(self.opened) == self.hangs)


class ClockedServer(AnalyticServer):
    def __init__(self, target: ClockedTarget, config: Any, start_seconds: float, hangs: bool) -> None:
        super().__init__(target, config)
        self.clocked, self.start_seconds, self.hangs = target, start_seconds, hangs

    def run(self, schedule: Any, progress: Any = None, stop: Any = None, **limits: float | None) -> Records:
        seconds = schedule.duration or max(r.intended for r in schedule.requests)
        if self.hangs:
            self.clocked.seconds += WATCHDOG_SECONDS + WATCHDOG_FACTOR * seconds
            raise RunFailed("hangs", "a load had not ended")
        self.clocked.seconds += seconds * (1 + schedule.seed % 4 / 10)
        return super().run(schedule, progress, stop)


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def trial_begins(self, *told: Any) -> None:
        self.notes.append("trial")


def test_what_a_budget_affords_is_said_before_the_first_start(tmp_path: Path) -> None:
    """As far as an earlier study tells; another server, or a file that is none, tells nothing."""
    known = KnownCosts(tmp_path / "cache" / "costs.json")
    for budget, said in (
        (400.0, "no start of this server is remembered"),
        (400.0, "as in the last study of this server, a start costs"),
        (60.0, "affords no other trial"),
    ):
        diary = Notes()
        study(tmp_path, observer=diary, known_costs=known, strategy="random", budget=budget)
        first = diary.notes[: diary.notes.index("trial")]
        assert [note for note in first if said in note], first
    assert known.of(Job(target="vllm", run_seconds=20.0)) is None
    assert known.of(Job(run_seconds=20.0)) is not None
    known.file.write_text('{"a": {"start": "soon"}}')
    assert known.of(Job(run_seconds=20.0)) is None


def study(tmp_path: Path, **job: Any) -> tuple[Any, Any, Any]:
    target = ClockedTarget(job.pop("hangs", 0))
    observer, known = job.pop("observer", Observer()), job.pop("known_costs", KnownCosts())
    record = open_study(optuna.storages.InMemoryStorage(), "s", parse_slo("itl").objective)
    bench = Bench(target, observer, Interrupts(), tmp_path)
    optimizer = Optimizer(Job(**{"rate": 1.0, "run_seconds": 20.0, **job}), bench, record)
    optimizer.known_costs = known
    return optimizer, optimizer.run(), target.seconds


@pytest.mark.parametrize(
    ("strategy", "budget", "hangs"),
    [("random", 600.0, 0), ("random", 1200.0, HANGS), ("gp", 600.0, HANGS), ("gp", 1200.0, 0)],
)
def test_a_budget_is_kept_within_a_tenth(tmp_path: Path, strategy: str, budget: float, hangs: Any) -> None:
    optimizer, outcome, seconds = study(tmp_path, strategy=strategy, budget=budget, hangs=hangs)
    assert seconds <= 1.1 * budget
    proven_early = outcome.confirmation.pairs < optimizer.plan.pairs
    enough = "expected to gain more" in outcome.ended and strategy == "gp"
    assert seconds >= 0.9 * budget or proven_early or enough
    assert outcome.kind == "better"
    statuses = [r.status for r in optimizer.study.results]
    assert statuses.count("failed") == bool(hangs)


def test_pairs_end_when_the_gain_is_proven(tmp_path: Path) -> None:
    """Of the 16 that an hour affords."""
    _, outcome, _ = study(tmp_path, strategy="gp", budget=3600.0, trials=12)
    assert outcome.confirmation.pairs in (4, 6)


def test_pairs_that_are_asked_for_stay(tmp_path: Path) -> None:
    _, outcome, _ = study(tmp_path, strategy="gp", budget=3600.0, pairs=3, trials=12)
    assert outcome.confirmation.pairs == 3


def test_a_budget_that_affords_no_trial_puts_the_best_guess_to_the_proof(tmp_path: Path) -> None:
    """The baseline takes about 25 s: with the three pairs that are kept it leaves less than a trial takes."""
    optimizer, outcome, seconds = study(tmp_path, strategy="gp", budget=190.0)
    assert optimizer.plan.affordable_trials == 0
    assert "put to the proof at once" in optimizer.plan.describe()
    assert outcome.confirmation is not None
    assert outcome.confirmation.pairs >= 2
    assert outcome.kind == "better"
    tried = [r for r in optimizer.study.results if r.launched]
    assert len(tried) == 2
    assert tried[1].value(optimizer.slo.objective) == outcome.confirmation.candidate.value("itl_es99")
    assert outcome.best.number == tried[1].number
    assert seconds <= 1.1 * 190.0
