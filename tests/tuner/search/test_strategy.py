"""Strategies against the formula: what each proposes, and that all of them end."""

import optuna
import pytest
from analytic_study import SLO, drive, make

from tuner.search.strategies import STRATEGIES
from tuner.search.strategy import StaircaseStrategy


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_ends_a_space_that_is_tried_whole(name: str) -> None:
    study = make(STRATEGIES[name](1), fix=["all"], vary={"max_num_seqs": (64, 256)})
    assert len(drive(study, 100)) <= 3
    assert study.propose() is None


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_goes_on_after_a_resume_as_if_it_had_not_stopped(name: str) -> None:
    storage = optuna.storages.InMemoryStorage()
    first = make(STRATEGIES[name](1), storage)
    drive(first, 4)
    resumed = make(STRATEGIES[name](1), storage)
    assert first.strategy.propose(first.history) == resumed.strategy.propose(resumed.history)


def test_the_staircase_changes_one_flag_at_a_time_and_keeps_what_improves() -> None:
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
