"""Several workers: what is proposed while others still measure."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from analytic_study import drive, make, result

from tuner.search.gp import Points, fit
from tuner.search.model import ModelStrategy
from tuner.search.pool import encode
from tuner.search.strategy import StaircaseStrategy


def distance(study: Any, config: Any, suggestion: Any) -> float:
    """In the unit cube of the space."""
    a, b = encode(study.space, [config, study.space.config(suggestion.params)])
    return float(np.linalg.norm(a - b))


def test_two_proposals_in_a_row_are_not_neighbours_of_the_same_favourite() -> None:
    alone, apart, study = [], [], make(ModelStrategy(5))
    for more in (5, 0, 1):  # after 5, 6 and 8 trials
        drive(study, more)
        proposal = study.propose()
        running, history = proposal.config, study.history
        assert history.running == (running,)
        alone.append(distance(study, running, study.strategy.propose(replace(history, running=()))))
        apart.append(distance(study, running, study.strategy.propose(history)))
        study.tell(proposal, result(proposal))
    assert min(alone) < 0.3, "who knows nothing of the other worker proposes the next rung"
    assert min(apart) > 0.5


def test_what_one_worker_alone_proposes_is_what_it_was() -> None:
    study = make(ModelStrategy(1))
    drive(study, 5)
    history = study.history
    assert history.running == ()
    assert study.strategy.surrogates(history) is study.strategy.surrogates(history)


@pytest.mark.parametrize("predicted", [False, True])
def test_fantasies_move_no_mean_and_shrink_deviations(predicted: bool) -> None:
    rng = np.random.default_rng(1)
    x, new, at = rng.random((12, 3)), rng.random((2, 3)), rng.random((50, 3))
    phi = (lambda x: x[:, 0]) if predicted else (lambda x: None)
    process = fit(Points(x, phi(x)), x.sum(1) + 0.02 * rng.standard_normal(12))
    pending = process.with_fantasies(Points(new, phi(new)))
    before, after = process(Points(at, phi(at))), pending(Points(at, phi(at)))
    assert after[0] == pytest.approx(before[0])
    assert (after[1] <= before[1] + 1e-9).all()
    there = [p(Points(new, phi(new)))[1] for p in (process, pending)]
    assert (there[1] < 0.75 * there[0]).all()


def test_fantasies_one_by_one_are_fantasies_at_once() -> None:
    rng = np.random.default_rng(2)
    x, new, at = rng.random((8, 2)), rng.random((2, 2)), Points(rng.random((9, 2)))
    process = fit(Points(x), x.sum(1))
    once = process.with_fantasies(Points(new))
    twice = process.with_fantasies(Points(new[:1])).with_fantasies(Points(new[1:]))
    assert twice(at)[1] == pytest.approx(once(at)[1], abs=1e-6)


def test_a_step_of_the_staircase_that_another_worker_is_on_is_left_to_it() -> None:
    study = make(StaircaseStrategy())
    drive(study, 1)
    first, second = study.propose(), study.propose()
    for proposal in (first, second):
        assert proposal.origin.startswith("staircase")
    assert first.config != second.config
    assert not [r for r in study.results if r.status == "interrupted"], "no worker asked for it in vain"
