"""What the tuner knows of a problem's server once its baseline is measured, and the simulator fitted to that.

The profile is of the problem's own simulated server; the baseline's figures are the table's, without noise.
Where the table was measured they are a real run's, and the profile is of the simulator's idea of that server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tuner.noise import TABLE_SETTING
from benchmarks.tuner.problems import MEASURED, SEQS, Problem
from benchmarks.tuner.tables import CACHE, Builder, Entry, Table, cached, server_of, table
from servers.kinds import KINDS
from servers.start_log import LINES, read_start_log
from tuner.runs.profiling import Profile, time_alone
from tuner.runs.result import TrialResult
from tuner.search.fitted_simulator import FittedSimulator, fit_simulator
from tuner.space.knobs import started_with

_profiles: dict[str, Profile] = {}
"""Of problems by name, made once."""


def profile_of(problem: Problem) -> Profile:
    """What the baseline's server tells."""
    if problem.name not in _profiles:
        _profiles[problem.name] = _profile(problem)
    return _profiles[problem.name]


def _profile(problem: Problem) -> Profile:
    with server_of(problem).open(problem.baseline) as server:
        context = server.max_model_len
        assert context is not None, "a simulated server knows its context"
        alone = time_alone(server, context, 0, lambda to, load: to.run(load))
        told = read_start_log(
            server.log_tail(LINES),
            KINDS[problem.job.server],
            problem.baseline,
            started_with(problem.job.server),
            metrics=server.scrape(),
            proportional=True,
        )
    return Profile(
        context,
        problem.start_seconds,
        alone.prefill_speed,
        rate=problem.rate,
        concurrency=problem.concurrency,
        lone_itl=alone.itl,
        memory=told.memory.to_json() if told.memory else None,
    )


def running(problem: Problem, entry: Entry, flags: Mapping[str, Any]) -> int:
    """What the gauge would have shown: of an open loop by Little's law."""
    wanted = problem.concurrency or math.ceil((problem.rate or 0.0) * entry.figures["e2e_p95"])
    return min(wanted, int(flags[SEQS]))


def fitted_simulator_of(problem: Problem, entry: Entry) -> FittedSimulator:
    """``entry``: the baseline's."""
    profile = profile_of(problem)
    if problem is MEASURED:
        with server_of(problem).open(problem.baseline) as server:
            schedules = list(TABLE_SETTING.load(server, 0, problem.run_seconds).rungs())
    else:
        builder = Builder(problem, server_of(problem))
        schedules = [builder.load(profile.max_model_len).confirmation(0)]
    baseline = TrialResult(
        0,
        problem.baseline,
        "baseline",
        "measured",
        measurement=entry.measurement,
        peak_running=running(problem, entry, problem.baseline),
    )
    return fit_simulator(profile, baseline, schedules, problem.slo)


def fitted_table(problem: Problem, cache: Path = CACHE) -> Table:
    """What the fitted simulator predicts; like the other priors it sees other requests than the truth
    does."""

    def make() -> Builder:
        fitted = fitted_simulator_of(problem, table(problem).entry(problem.baseline))
        print(f"{problem.name}: {fitted.describe()}", flush=True)
        return Builder(problem, fitted.target, seed=7)

    return cached(problem, "fitted", make, cache)
