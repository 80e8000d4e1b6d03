"""The Gaussian process: exact gradients, calibrated on what it has not seen, corrected priors."""

import math

import numpy as np
import pytest
from scipy.optimize import check_grad

from tuner import gp

rng = np.random.default_rng(3)
SEEN, UNSEEN = rng.random((24, 4)), rng.random((400, 4))


def truth(x):
    """Smooth, of three of four dimensions."""
    return np.sin(3 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + 0.4 * x[:, 2] * x[:, 0]


def error(mean):
    return float(np.sqrt(np.mean((mean - truth(UNSEEN)) ** 2)))


def test_the_gradient_of_the_hyperparameters_is_exact():
    x, y = SEEN[:12], truth(SEEN[:12])
    squares = (x[:, None, :] - x[None, :, :]) ** 2
    fixed = np.full((12, 12), gp.LEVEL**2) + 1e-6 * np.eye(12)
    centre, width = np.array([-0.2] * 4 + [0.0, -3.0]), np.ones(6)
    args = (squares, y, fixed, centre, width)
    for theta in (centre, centre + 0.3, centre - 0.2 * np.arange(6)):
        assert check_grad(lambda t: gp._loss(t, *args)[0], lambda t: gp._loss(t, *args)[1], theta) < 1e-3


def test_it_foretells_what_it_has_not_seen_and_says_how_well():
    mean, deviation = gp.fit(SEEN, truth(SEEN))(UNSEEN)
    assert error(mean) < 0.15 * float(np.std(truth(UNSEEN)))
    within = np.abs(mean - truth(UNSEEN)) < 2 * deviation
    assert within.mean() > 0.9
    assert gp.fit(SEEN, truth(SEEN))(SEEN)[1].max() < deviation.mean()


def test_a_prediction_that_is_off_by_half_helps_at_few_points():
    few = SEEN[:6]
    mean, _ = gp.fit(few, truth(few))(UNSEEN)
    ahead = 0.6 * truth(UNSEEN)
    process = gp.fit(few, truth(few), predicted=0.6 * truth(few) - ahead.mean())
    assert error(process(UNSEEN, ahead - ahead.mean())[0]) < 0.5 * error(mean)


def test_a_prediction_of_the_opposite_loses_its_weight():
    ahead = -truth(UNSEEN)
    process = gp.fit(SEEN, truth(SEEN), predicted=-truth(SEEN) - ahead.mean())
    assert process.slope < 0.3
    mean, _ = process(UNSEEN, ahead - ahead.mean())
    assert error(mean) < 0.15 * float(np.std(truth(UNSEEN)))


def test_a_point_with_a_variance_of_its_own_counts_less():
    x, y = np.array([[0.2], [0.5], [0.8]]), np.array([0.0, 1.0, 0.0])
    sure = gp.fit(x, y)(x)[0]
    unsure = gp.fit(x, y, np.array([0.0, 4.0, 0.0]))(x)[0]
    assert unsure[1] < 0.6 * sure[1]


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_one_point_or_equal_ones_give_a_finite_answer(value):
    for x in (SEEN[:1], SEEN[:5]):
        mean, deviation = gp.fit(x, np.full(len(x), value))(UNSEEN)
        assert np.isfinite(deviation).all()
        assert mean == pytest.approx(np.full(len(UNSEEN), value), abs=0.01)
        assert math.isfinite(float(deviation.max()))
