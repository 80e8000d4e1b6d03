"""Strategies against the formula: what each proposes, and that all of them end."""

import optuna
import pytest
from analytic_target import measure

from servers.slo.objective import PRESETS
from tuner.runs.result import BASELINE, SERVES, TrialResult
from tuner.search.strategies import STRATEGIES
from tuner.search.strategy import StaircaseStrategy
from tuner.search.study import Study
from tuner.space.space import build_space, effective
from tuner.workers.storage import open_study

SLO = PRESETS["itl"]
DEFAULTS = effective({}, "bundled")
BOUNDS = SLO.resolve(measure(DEFAULTS).value)


def make(strategy, storage=None, **space):
    record = open_study(storage or optuna.storages.InMemoryStorage(), "test", SLO.objective)
    study = Study(record, build_space(DEFAULTS, 8192, **space), SLO.objective, 1, strategy)
    study.bounds, study.relative = SLO.bounds, SLO.relative
    study.enqueue(DEFAULTS, BASELINE)
    return study


def result(proposal):
    measurement = measure(proposal.config)
    violations = {SERVES: 0.0, **measurement.violations(BOUNDS)}
    parts = {"measurement": measurement, "short": measurement, "violations": violations}
    return TrialResult(proposal.number, proposal.config, proposal.origin, "measured", **parts)


def drive(study, trials):
    for _ in range(trials):
        proposal = study.propose()
        if proposal is None:
            break
        study.tell(proposal, result(proposal))
    return study.history.launched


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_ends_a_space_that_is_tried_whole(name):
    study = make(STRATEGIES[name](1), fix=["all"], vary={"max_num_seqs": (64, 256)})
    assert len(drive(study, 100)) <= 3
    assert study.propose() is None


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_goes_on_after_a_resume_as_if_it_had_not_stopped(name):
    storage = optuna.storages.InMemoryStorage()
    first = make(STRATEGIES[name](1), storage)
    drive(first, 4)
    resumed = make(STRATEGIES[name](1), storage)
    assert first.strategy.propose(first.history) == resumed.strategy.propose(resumed.history)


def test_the_staircase_changes_one_flag_at_a_time_and_keeps_what_improves():
    study = make(StaircaseStrategy())
    told = drive(study, 100)
    assert study.propose() is None
    best = told[0]
    for step in told[1:]:
        differing = [flag for flag, value in step.config.items() if value != best.config[flag]]
        assert len(differing) == 1
        if step.feasible and step.value(SLO.objective) < best.value(SLO.objective):
            best = step
    assert best.value(SLO.objective) < 0.6 * told[0].value(SLO.objective)
    flags = [r.origin.split()[1] for r in told[1:]]
    assert list(dict.fromkeys(flags)) == ["gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"]
