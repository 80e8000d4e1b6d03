"""A Gaussian process for few, smooth, nearly noiseless figures: some dozens of trials over some ten knobs.

Kernel: a constant, Matérn 5/2 with a length for every dimension, noise; and, where a prediction is given for
every point, a line in it. The line's slope is 1 a priori, so that the process models what the prediction
misses, and shrinks towards 0 where the data do not follow the prediction (Rasmussen & Williams, section 2.7).
Values that were measured under different sets of requests differ by a level of each set.
Hyperparameters are the most probable ones under broad log-normal priors, found by L-BFGS on exact gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.optimize import minimize

Array = NDArray[np.float64]

CONSTANT_SD = 10.0
"""Standard deviation of the constant, in standard deviations of the data: nearly flat."""
SLOPE_SD = 0.4
"""Standard deviation of the prediction's slope around 1."""
LOG_LENGTH = (math.log(0.8), 0.8)
"""Mean and deviation of a length's logarithm; the dimensions run from 0 to 1."""
LOG_AMPLITUDE = (math.log(1.0), 0.7)
"""The same of the amplitude, in standard deviations of the data."""
NOISE, LOG_NOISE_SD = 0.03, 0.8
"""The noise that is expected, in units of y, where nothing better is known, and its logarithm's deviation."""
REQUEST_SET_SD = 0.1
"""Standard deviation of a request set's level, in units of y: how much harder one set is than another."""
JITTER = 1e-8
OPTIMISER_OPTIONS: Mapping[str, float] = {"maxiter": 20, "ftol": 1e-4}
"""Hyperparameters need not be exact: their own uncertainty is larger."""
_SQRT5 = math.sqrt(5.0)


@dataclass(frozen=True)
class Points:
    """Where a process is asked, ``x`` (m, d); and what a prior predicts there, (m,), in units of y.

    Predictions should be centred on all points that will be asked for: the line turns around 0.
    """

    x: Array
    predicted: Array | None = None
    request_sets: Array | None = None
    """Which set of requests each is measured under, (m,); None where it makes no difference."""

    def __getitem__(self, rows: Any) -> Points:
        return Points(self.x[rows], *(None if part is None else part[rows] for part in self._parts))

    def __add__(self, more: Points) -> Points:
        """Both one after the other; they must tell the same of each point."""
        parts = (
            None if a is None or b is None else np.concatenate([a, b])
            for a, b in zip(self._parts, more._parts, strict=True)
        )
        return Points(np.concatenate([self.x, more.x]), *parts)

    @property
    def _parts(self) -> tuple[Array | None, Array | None]:
        return self.predicted, self.request_sets


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters. ``amplitude``: in standard deviations of the data; ``noise``: in units of y."""

    lengths: Array
    amplitude: float
    noise: float


@dataclass(frozen=True)
class GaussianProcess:
    """What the values at n points say about all others. Made by :func:`fit`."""

    points: Points
    shape: Hyperparameters
    slope: float
    """The posterior mean of the predictions' slope; 0 without any."""
    mean: float
    scale: float
    _factor: Array
    """The lower Cholesky factor of the points' covariance."""
    _weights: Array

    def __call__(self, at: Points, against: Points | None = None) -> tuple[Array, Array]:
        """(means, standard deviations) of the noiseless values at m points.

        ``against``: one point, whose own value is subtracted from each of theirs.
        """
        cross, mean = self._covariance(at, self.points), self.mean + self._predicted(at)
        variance = self._variance(at)
        if against is not None:
            cross = cross - self._covariance(against, self.points)
            mean = mean - (self.mean + self._predicted(against))
            variance = variance + self._variance(against) - 2 * self._covariance(at, against)[:, 0]
        mean = mean + self.scale * (cross @ self._weights)
        explained = lapack.dtrtrs(self._factor, cross.T, lower=1)[0]
        variance = variance - np.einsum("nm,nm->m", explained, explained)
        return mean, self.scale * np.sqrt(np.maximum(variance, 1e-8))

    def means(self, at: Points) -> Array:
        """The means alone, at a fraction of the time."""
        return (
            self.mean + self._predicted(at) + self.scale * (self._covariance(at, self.points) @ self._weights)
        )

    def with_fantasies(self, at: Points) -> GaussianProcess:
        """As if m more points were measured and came out as expected: means stay, deviations shrink.

        The kriging believer of Ginsbourger, Le Riche and Carraro 2010, "Kriging is well-suited to parallelize
        optimization".
        """
        known, m = self.points, len(at.x)
        across = lapack.dtrtrs(self._factor, self._covariance(known, at), lower=1)[0]
        rest = self._covariance(at, at) - across.T @ across
        rest.flat[:: m + 1] += (self.shape.noise / self.scale) ** 2 + JITTER
        return replace(
            self,
            points=known + at,
            _factor=np.block([[self._factor, np.zeros_like(across)], [across.T, _cholesky(rest)]]),
            _weights=np.concatenate([self._weights, np.zeros(m)]),
        )

    def _predicted(self, at: Points) -> Array:
        return np.zeros(len(at.x)) if at.predicted is None else at.predicted

    def _covariance(self, a: Points, b: Points) -> Array:
        """In units of the scale, squared."""
        return self.shape.amplitude**2 * _matern(a.x, b.x, self.shape.lengths) + _given(a, b, self.scale)

    def _variance(self, at: Points) -> Array:
        drawn = 0.0 if at.request_sets is None else (REQUEST_SET_SD / self.scale) ** 2
        slope = (SLOPE_SD / self.scale * self._predicted(at)) ** 2
        return self.shape.amplitude**2 + CONSTANT_SD**2 + slope + drawn


@dataclass(frozen=True)
class _Data:
    """What was measured, in its own standard deviations."""

    target: Array
    """(n,), what the prediction misses."""
    mean: float
    scale: float
    fixed: Array
    """(n, n), the part of the covariance that no hyperparameter changes."""

    @classmethod
    def of(cls, points: Points, y: Array, variances: Array | None) -> _Data:
        phi = points.predicted
        missed = y if phi is None else y - phi
        mean, scale = float(np.mean(missed)), max(float(np.std(y)), 0.05)
        extra = np.zeros(len(y)) if variances is None else variances / scale**2
        fixed = _given(points, points, scale) + np.diag(extra + JITTER)
        return cls((missed - mean) / scale, mean, scale, fixed)


def most_probable(
    points: Points, y: Array, variances: Array | None = None, noise: float = NOISE
) -> Hyperparameters:
    """The hyperparameters for values at n points. ``noise``: as it is expected. See :func:`fit`."""
    data, dimensions = _Data.of(points, y, variances), points.x.shape[1]
    squares = (points.x[:, None, :] - points.x[None, :, :]) ** 2
    centre = np.array([*[LOG_LENGTH[0]] * dimensions, LOG_AMPLITUDE[0], math.log(noise / data.scale)])
    width = np.array([*[LOG_LENGTH[1]] * dimensions, LOG_AMPLITUDE[1], LOG_NOISE_SD])
    best = minimize(
        _loss, centre, args=(squares, data.target, data.fixed, centre, width), jac=True, method="L-BFGS-B",
        bounds=[(c - 3 * w, c + 3 * w) for c, w in zip(centre, width, strict=True)],
        options=OPTIMISER_OPTIONS,
    )  # fmt: skip
    found = np.exp(best.x)
    return Hyperparameters(found[:-2], float(found[-2]), float(found[-1]) * data.scale)


def fit(
    points: Points, y: Array, variances: Array | None = None, shape: Hyperparameters | None = None
) -> GaussianProcess:
    """``variances`` (n,): noise that a point has beyond the common one, in units of y squared.

    ``shape``: by default the most probable one.
    """
    shape = shape or most_probable(points, y, variances)
    data = _Data.of(points, y, variances)
    kernel = shape.amplitude**2 * _matern(points.x, points.x, shape.lengths) + data.fixed
    kernel.flat[:: len(y) + 1] += (shape.noise / data.scale) ** 2
    factor = _cholesky(kernel)
    weights = lapack.dpotrs(factor, data.target, lower=1)[0]
    phi = points.predicted
    slope = 0.0 if phi is None else 1.0 + SLOPE_SD**2 / data.scale * float(phi @ weights)
    return GaussianProcess(points, shape, slope, data.mean, data.scale, factor, weights)


def _given(a: Points, b: Points, scale: float) -> Array:
    """The part of the covariance that no hyperparameter changes, in units of the scale, squared."""
    found = np.full((len(a.x), len(b.x)), CONSTANT_SD**2)
    if a.predicted is not None and b.predicted is not None:
        found += (SLOPE_SD / scale) ** 2 * np.outer(a.predicted, b.predicted)
    if a.request_sets is not None and b.request_sets is not None:
        found += (REQUEST_SET_SD / scale) ** 2 * (a.request_sets[:, None] == b.request_sets[None, :])
    return found


def _cholesky(kernel: Array) -> Array:
    """The lower factor. Around matrices this small scipy's own checks take longer than the work."""
    factor: Array
    factor, failed = lapack.dpotrf(kernel, lower=1)
    if failed:
        raise np.linalg.LinAlgError("a covariance is not positive definite")
    return factor


def _matern(a: Array, b: Array, lengths: Array) -> Array:
    """Matérn 5/2 of every pair."""
    u, v = a / lengths, b / lengths
    squared = (u**2).sum(1)[:, None] + (v**2).sum(1)[None, :] - 2 * u @ v.T
    r = _SQRT5 * np.sqrt(np.maximum(squared, 0.0))
    found: Array = (1 + r + r**2 / 3) * np.exp(-r)
    return found


def _loss(
    theta: Array, squares: Array, target: Array, fixed: Array, centre: Array, width: Array
) -> tuple[float, Array]:
    """The negative log posterior of the hyperparameters, and its gradient."""
    inverse = np.exp(-2 * theta[:-2])
    amplitude, noise = np.exp(2 * theta[-2]), np.exp(2 * theta[-1])
    r = _SQRT5 * np.sqrt(squares @ inverse)
    decay = np.exp(-r)
    matern = amplitude * (1 + r + r**2 / 3) * decay
    kernel = matern + fixed
    kernel.flat[:: len(target) + 1] += noise
    factor = _cholesky(kernel)
    weights = lapack.dpotrs(factor, target, lower=1)[0]
    off = (theta - centre) / width
    loss = 0.5 * target @ weights + np.log(np.diag(factor)).sum() + 0.5 * off @ off
    inverted = lapack.dpotri(factor, lower=1)[0]  # of its lower half
    sensitivity = inverted + np.tril(inverted, -1).T - np.outer(weights, weights)
    slopes = amplitude * 5 / 3 * (1 + r) * decay * sensitivity
    by_length = 0.5 * (slopes.reshape(-1) @ squares.reshape(-1, squares.shape[-1])) * inverse
    by_amplitude, by_noise = float((sensitivity * matern).sum()), noise * float(np.trace(sensitivity))
    return float(loss), np.array([*by_length, by_amplitude, by_noise]) + off / width
