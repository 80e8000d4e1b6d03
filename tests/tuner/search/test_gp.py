"""The Gaussian process: exact gradients, calibrated on what it has not seen, corrected priors."""

from typing import Any

import numpy as np
import pytest
from scipy.optimize import check_grad

from tuner.search import gp
from tuner.search.gp import Points

rng = np.random.default_rng(3)
SEEN, UNSEEN = rng.random((24, 4)), rng.random((400, 4))


def truth(x: np.ndarray) -> Any:
    """Smooth, of three of four dimensions."""
    return np.sin(3 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 0.4 * x[:, 2] * x[:, 0]


def error(mean: Any) -> float:
    return float(np.sqrt(np.mean((mean - truth(UNSEEN)) ** 2)))


def test_the_gradient_of_the_hyperparameters_is_exact() -> None:
    x, y = SEEN[:12], truth(SEEN[:12])
    squares = (x[:, None, :] - x[None, :, :]) ** 2
    fixed = np.full((12, 12), gp.CONSTANT_SD**2) + 1e-6 * np.eye(12)
    centre, width = np.array([-0.2] * 4 + [0.0, -3.0]), np.ones(6)
    args = (squares, y, fixed, centre, width)
    for theta in (centre, centre + 0.3, centre - 0.2 * np.arange(6)):
        assert check_grad(lambda t: gp._loss(t, *args)[0], lambda t: gp._loss(t, *args)[1], theta) < 1e-3


def test_it_foretells_what_it_has_not_seen_and_says_how_well() -> None:
    process = gp.fit(Points(SEEN), truth(SEEN))
    mean, deviation = process(Points(UNSEEN))
    assert error(mean) < 0.15 * float(np.std(truth(UNSEEN)))
    within = np.abs(mean - truth(UNSEEN)) < 2 * deviation
    assert within.mean() > 0.9
    assert process(Points(SEEN))[1].max() < deviation.mean()


def test_the_difference_to_a_point_is_surer_than_either_near_it_and_zero_at_it() -> None:
    process = gp.fit(Points(SEEN[:6]), truth(SEEN[:6]))
    mean, deviation = process(Points(UNSEEN), against=Points(UNSEEN[:1]))
    assert mean[0] == pytest.approx(0.0, abs=1e-6)
    assert deviation[0] < 0.01
    plain, _ = process(Points(UNSEEN))
    assert mean == pytest.approx(plain - plain[0], abs=1e-6)
    near = UNSEEN[:1] + 0.01
    assert process(Points(near), Points(UNSEEN[:1]))[1] < 0.5 * process(Points(near))[1]


def predicting(factor: Any, few: np.ndarray) -> tuple[Points, Points]:
    """Points of a prediction that is ``factor`` times the truth, and the same of what was not seen."""
    level = factor * truth(UNSEEN).mean()
    return Points(few, factor * truth(few) - level), Points(UNSEEN, factor * truth(UNSEEN) - level)


def test_a_prediction_that_is_off_by_half_helps_at_few_points() -> None:
    few = SEEN[:6]
    mean, _ = gp.fit(Points(few), truth(few))(Points(UNSEEN))
    told, asked = predicting(0.6, few)
    assert error(gp.fit(told, truth(few))(asked)[0]) < 0.5 * error(mean)


def test_a_prediction_of_the_opposite_loses_its_weight() -> None:
    told, asked = predicting(-1.0, SEEN)
    process = gp.fit(told, truth(SEEN))
    assert process.slope < 0.3
    assert error(process(asked)[0]) < 0.15 * float(np.std(truth(UNSEEN)))


def test_a_point_with_a_variance_of_its_own_counts_less() -> None:
    points, y = Points(np.array([[0.2], [0.5], [0.8]])), np.array([0.0, 1.0, 0.0])
    sure = gp.fit(points, y)(points)[0]
    unsure = gp.fit(points, y, np.array([0.0, 4.0, 0.0]))(points)[0]
    assert unsure[1] < 0.6 * sure[1]


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_one_point_or_equal_ones_give_a_finite_answer(value: float) -> None:
    for x in (SEEN[:1], SEEN[:5]):
        mean, deviation = gp.fit(Points(x), np.full(len(x), value))(Points(UNSEEN))
        assert np.isfinite(deviation).all()
        assert mean == pytest.approx(np.full(len(UNSEEN), value), abs=0.01)
