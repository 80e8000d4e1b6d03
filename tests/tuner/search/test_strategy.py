"""Strategies against the formula: what each proposes, and that all of them end."""

import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from analytic_study import DEFAULTS, SLO, drive, make

from servers.slo.objective import Objective
from tuner.runs.result import BASELINE, SERVES, Measurement, Reading, TrialResult
from tuner.search.strategies import STRATEGIES
from tuner.search.strategy import (
    History,
    StaircaseStrategy,
    TpeStrategy,
    by_measurement,
    improves,
)
from tuner.space.space import build_space


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


SPACE = build_space(DEFAULTS, 8192)
ITL, RATE = Objective("itl_es99", "minimize"), Objective("throughput", "maximize")


def told(number: int, changes: dict[str, Any], value: float, slack: float = 0.5, **given: Any) -> TrialResult:
    """With ``value`` as its ITL, and its inverse as its throughput."""
    measurement = Measurement({"itl_es99": Reading(value), "throughput": Reading(1 / value)}, 10.0)
    violations = {SERVES: 0.0, "ttft_es95": -slack}
    parts: dict[str, Any] = {
        "status": "measured",
        "measurement": measurement,
        "violations": violations,
        **given,
    }
    return TrialResult(number, {**DEFAULTS, **changes}, "test" if changes else BASELINE, **parts)


FEWER, FEWEST, BOTH = (
    {"max_num_batched_tokens": 512},
    {"max_num_batched_tokens": 256},
    {"max_num_batched_tokens": 512, "max_num_seqs": 64},
)


@pytest.mark.parametrize(
    ("results", "ranked"),
    [
        ([told(0, {}, 1.0), told(1, FEWER, 0.5), told(2, FEWEST, 0.3)], [2, 0, 1]),
        ([told(0, {}, 0.2), told(1, FEWER, 0.5), told(2, FEWEST, 0.3)], [0, 2, 1]),
        ([told(0, {}, 0.5), told(1, FEWER, 0.5)], [0, 1]),
        ([told(0, {}, 1.0), told(1, BOTH, 0.5), told(2, FEWEST, 0.54)], [2, 0, 1]),
        ([told(0, {}, 1.0), told(1, BOTH, 0.5), told(2, FEWEST, 0.56)], [1, 0, 2]),
        ([told(0, {}, 1.0), told(1, FEWER, 0.5, 0.15), told(2, FEWEST, 0.3, 0.14)], [1, 0, 2]),
        ([told(0, {}, 1.0), told(1, BOTH, 0.5, 0.2), told(2, FEWEST, 0.5, 0.15)], [2, 0, 1]),
        ([told(0, {}, 1.0), told(1, BOTH, 0.5, 0.2), told(2, FEWEST, 0.5, 0.14)], [1, 0, 2]),
        ([told(0, {}, 1.0), told(1, FEWER, 0.5, -0.1)], [0]),
        ([told(0, {}, 1.0, -0.1), told(1, FEWER, 0.5)], [1]),
        ([told(0, {}, 1.0), told(1, FEWER, math.inf)], [0]),
        ([], []),
    ],
    ids=[
        "the best before the user's own",
        "the user's own is the best",
        "as good as the user's own",
        "a tie by fewer changes",
        "no tie",
        "near its bound comes last",
        "a tie at the least distance",
        "a tie below the least distance",
        "what misses a bound is not ranked",
        "nor is the user's own that does",
        "nor what has no figure",
        "nothing",
    ],
)
def test_the_ranking_by_what_was_measured(results: Any, ranked: list[int]) -> None:
    assert [r.number for r in by_measurement(History(SPACE, ITL, tuple(results)))] == ranked
    if all(math.isfinite(r.value(ITL)) for r in results) and len(results) < 3:
        assert [r.number for r in by_measurement(History(SPACE, RATE, tuple(results)))] == ranked


def test_one_config_improves_on_another() -> None:
    held, better = told(1, FEWER, 0.5), told(2, FEWEST, 0.4)
    missed, nearer = told(3, FEWER, 0.1, -0.3), told(4, FEWER, 0.2, -0.2)
    order = [better, held, nearer, missed]
    for i, one in enumerate(order):
        assert [improves(one, other, ITL) for other in order] == [j > i for j in range(4)]
    assert improves(nearer, replace(missed, violations={SERVES: -5.0, "ttft_es95": 0.3}), ITL)
    assert improves(missed, replace(missed, violations={}, judged=False), ITL)


def test_tpe_moves_two_axes_of_the_best_every_other_time() -> None:
    best = told(1, FEWER, 0.5)
    odd = History(SPACE, ITL, (best,), best=best)
    near = TpeStrategy(1).propose(odd)
    assert near.origin == "sampler, near the best"
    params = SPACE.params(best.config)
    assert len(near.params) == len(params) - 2
    assert near.params.items() <= params.items()
    free = [replace(odd, results=(told(0, {}, 1.0), best)), replace(odd, best=None)]
    assert [TpeStrategy(1).propose(history).params for history in free] == [{}, {}]


def test_what_came_of_a_config() -> None:
    one, two = told(0, {}, 1.0), told(1, FEWER, 0.5)
    history = History(SPACE, ITL, (one, two, replace(two, number=2, status="refused")))
    assert history.of(two.config) is two
    assert history.of({**DEFAULTS, **FEWEST}) is None
    assert (history.baseline, history.launched) == (one, (one, two))
    assert History(SPACE, ITL, (two,)).baseline is None
