"""The tuner's own code on a bench that looks runs up in a table."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import optuna

from benchmarks.tuner.bed import Ledger, Mark, World, together
from benchmarks.tuner.fitted_simulator_problems import profile_of, running
from benchmarks.tuner.tables import Table
from loadgen.target import OpenTarget, Target
from servers.slo.bounds import name_of
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import SHORT_SHARE, Traffic
from tuner.runs.profiling import Profile
from tuner.runs.result import SERVES, TrialResult
from tuner.runs.rungs import reason_to_stop
from tuner.runs.scrape import ServerFigures
from tuner.search.model import ModelStrategy
from tuner.search.prior import Prediction, Prior
from tuner.search.study import Proposal
from tuner.space.space import Config
from tuner.study.candidate_confirmation import CandidateConfirmation
from tuner.study.confirmation import Confirmation, assess_pooled, compared
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench, Criteria

CONTEXT = 32_768


class TableTarget(Target):
    """Never opened; its clock is the world's."""

    name, restartable = "table", True

    def __init__(self, world: World) -> None:
        self.world = world

    def clock(self) -> float:
        return self.world.seconds

    def open(self, config: Mapping[str, Any]) -> NoReturn:
        raise AssertionError("a table's runs are looked up")

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return "table"


class TableBench(Bench):
    """Trials whose rungs are looked up, judged between them as real ones are."""

    @property
    def world(self) -> World:
        assert isinstance(self.target, TableTarget), "a bench of tables is given a table"
        return self.target.world

    def trial(
        self,
        proposal: Proposal,
        flags: Mapping[str, Any],
        load_for: Callable[[OpenTarget], Traffic],
        criteria: Criteria,
        server: OpenTarget | None = None,
    ) -> TrialResult:
        world = self.world
        begun, entry = world.seconds, world.table.entry(flags)
        start = world.start()

        def result(status: Any, reason: str, **parts: Any) -> TrialResult:
            seconds = {"start": start, "total": world.seconds - begun}
            return TrialResult(
                proposal.number, proposal.config, proposal.origin, status, reason, seconds=seconds, **parts
            )

        if entry.crash:
            reason = f"did not start: out_of_memory: {entry.crash}"
            return result("failed", reason, violations={SERVES: 1.0})
        short, whole = world.measurements(entry)
        world.load(entry, SHORT_SHARE)
        reason = reason_to_stop(
            short, criteria.short_bounds, criteria.slo.objective, criteria.incumbent, criteria.incumbent_whole
        )
        if not reason:
            world.load(entry, 1 - SHORT_SHARE)
        measured, bounds = (short, criteria.short_bounds) if reason else (whole, criteria.bounds)
        seen = {"peak_running": running(world.problem, entry, flags), **known(entry.server)}
        if reason:  # a short rung has too few scrapes for a peak
            seen |= {"peak_running": None, "peak_kv_usage": None}
        return result(
            "stopped" if reason else "measured",
            reason,
            violations={SERVES: 0.0, **measured.violations(bounds)},
            measurement=measured,
            short=short,
            **seen,
        )


def known(server: ServerFigures) -> dict[str, Any]:
    return {name: value for name, value in vars(server).items() if value is not None}


class TablePrior(Prior):
    """What a simulation with other coefficients says."""

    def __init__(self, table: Table, flags: Callable[[Config], Mapping[str, Any]]) -> None:
        super().__init__()
        self.source, self._table, self._flags = "table", table, flags

    def predict(self, config: Config) -> Prediction:
        entry = self._table.entries[self._table.problem.key({**self._table.problem.baseline, **config})]
        return Prediction(config, entry.figures, entry.crash)


@dataclass
class TableOptimizer(Optimizer):
    """The tuner, whose fresh runs are looked up as well."""

    prior: Table | None = None

    def _begin(self, profile: Profile) -> None:
        super()._begin(profile)
        if self.prior is not None and isinstance(self.study.strategy, ModelStrategy):
            self.study.strategy.prior = TablePrior(self.prior, self.flags)

    def _candidate_confirmation(self, ended: str) -> CandidateConfirmation:
        kept = super()._candidate_confirmation(ended)
        return TableConfirmation(**{f.name: getattr(kept, f.name) for f in fields(kept)})


class TableConfirmation(CandidateConfirmation):
    """The tuner's last act, with runs that are looked up."""

    def _confirm(self, best: TrialResult, baseline: TrialResult, pairs: int) -> Confirmation | str:
        assert isinstance(self.bench, TableBench), "runs that are looked up need a bench that looks up"
        world = self.bench.world
        sides = []
        for flags in (self.job.flags, self.flags(best.config)):
            entry = world.table.entry(flags)
            world.start()
            if entry.crash:
                return f"did not start: {entry.crash}"
            for _ in range(pairs):
                world.load(entry)
            sides.append(world.fresh(flags, pairs))
        a, b = sides
        values = {
            name_of(metric, cls): ([r.value(metric, cls) for r in a], [r.value(metric, cls) for r in b])
            for metric, cls in compared(self.slo)
        }
        return assess_pooled(values, together(a), together(b), self.slo, best.number, baseline.feasible)


class Bookkeeper(Observer):
    """Keeps the ledger of a search of ours."""

    def __init__(self, world: World) -> None:
        self.world, self.ledger = world, Ledger()
        self.flags: Callable[[Config], Mapping[str, Any]] = dict

    def trial_ends(self, result: TrialResult, outcome: str) -> None:
        flags = self.flags(result.config)
        self.ledger.launches += 1
        self.ledger.crashes += result.status == "failed"
        self.ledger.infeasible += not self.world.table.feasible(flags)

    def incumbent(self, result: TrialResult, outcome: str) -> None:
        mark = Mark(self.world.seconds, self.ledger.launches, self.flags(result.config))
        self.ledger.marks.append(mark)


def search_ours(world: World, seed: int, prior: Table | None, strategy: str = "auto") -> Ledger:
    problem = world.problem
    job = replace(problem.job, seed=seed, strategy=strategy)
    keeper = Bookkeeper(world)
    record = optuna.create_study(direction=problem.slo.objective.direction)
    profile = replace(profile_of(problem), max_model_len=CONTEXT, memory=None)  # crashes are to be found out
    record.set_user_attr("profile", profile.to_json())
    with tempfile.TemporaryDirectory() as out:
        optimizer = TableOptimizer(
            job, TableBench(TableTarget(world), keeper, Interrupts(), Path(out)), record, prior=prior
        )
        keeper.flags = lambda config: {**problem.baseline, **optimizer.flags(config)}
        outcome = optimizer.run()
    if outcome.kind == "better" and outcome.best is not None:
        keeper.ledger.recommended = keeper.flags(outcome.best.config)
    keeper.ledger.seconds = world.seconds
    return keeper.ledger
