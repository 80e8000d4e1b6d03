"""What the search believes of configs: a Gaussian process for every figure of the SLO, given all trials.

Figures are modelled as logarithms that should be small. A bound that is relative to the baseline is a
difference of two values of one process, so that the noise of the baseline's own measurement is not taken for
the baseline. Trials that were stopped early count as well, corrected by how a whole measurement compares with
its short rung where both are known. Repeats under other sets of requests count as they are where a bound is
absolute; else they are compared with what has the same requests. With a prior (``prior.py``) the processes
model what it misses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr

from loadgen.measure.estimator import floor_of
from servers.slo.bounds import COUNTS, Bound, name_of
from servers.slo.objective import Objective, RelativeBound
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.search.crashes import Codes, Crashes
from tuner.search.gp import Array, GaussianProcess, Hyperparameters, Points, fit, most_probable
from tuner.search.pool import encode
from tuner.search.prior import Prior
from tuner.search.strategy import History
from tuner.space.space import Config, config_key

SHORT_RUNG_LOG_SD = 0.1
"""Standard deviation of a short rung's logarithm against the whole, where no trial tells."""
OPEN_INTERVAL_LOG_SD = 0.5
"""The same of a reading whose interval has no end: it lacks the rare stalls."""
OWN_NOISE_SHARE = 0.5
"""Of a reading's own interval, how much is noise between configs: they are measured on equal requests."""
SCATTER_SHARE = 2 / 3
"""Of a change that counts (see ``floor_of``), by how much a run's figure scatters at least: the deviation of
the logarithm of TTFT ES95 against the baseline's on the same 40 requests is 0.08 to 0.15, of ITL ES99 0.12 to
0.25."""
MAX_LOG_VIOLATION = 1.5
"""Logarithms further than this beyond a bound are all alike: far."""
MAX_PRIOR_WEIGHT, PRIOR_PSEUDO_TRIALS = 0.7, 3
"""A prior's greatest weight, and how many trials its good name counts for."""
REFIT_FROM, REFIT_GROWTH = 8, 1.25
"""See :func:`deciding_points`."""
P_SERVES_DESPITE_PRIOR = 0.3
"""Chance that a server serves although the prior says that its memory does not suffice."""


def deciding_points(n: int) -> int:
    """Of ``n`` points, the first so many decide on the hyperparameters: a tenth more changes them little, and
    to find them takes most of the time.
    """
    return (
        n
        if n < REFIT_FROM
        else int(REFIT_FROM * REFIT_GROWTH ** int(math.log(n / REFIT_FROM, REFIT_GROWTH) + 1e-9))
    )


@dataclass(frozen=True)
class ModelledMetric:
    """One figure that is modelled, as a number that should be small."""

    metric: str
    cls: str | None
    sign: int
    """-1 for one that should be large."""
    limit: float = 1.0
    """What the figure is counted against; of a relative bound, the factor on the baseline's."""
    relative: bool = False

    @classmethod
    def of(cls, wanted: Objective | Bound | RelativeBound) -> ModelledMetric:
        match wanted:
            case Objective():
                return cls(wanted.metric, wanted.cls, 1 if wanted.direction == "minimize" else -1)
            case Bound():
                return cls(wanted.metric, wanted.cls, 1 if wanted.op == "<=" else -1, wanted.limit)
            case RelativeBound():
                return cls(wanted.metric, None, 1 if wanted.op == "<=" else -1, wanted.factor, relative=True)

    @property
    def name(self) -> str:
        return name_of(self.metric, self.cls)

    @property
    def counted(self) -> bool:
        return self.metric in COUNTS

    @property
    def distance(self) -> float:
        """What a scaled value should stay below 0: what one run scatters. 0 for a count."""
        return 0.0 if self.counted else self.scatter

    @property
    def scatter(self) -> float:
        """Deviation of a run's logarithm at least."""
        return SCATTER_SHARE * floor_of(self.metric)

    def value(self, scaled: float) -> float:
        """What ``scaled`` stands for; not for counts."""
        return self.limit * math.exp(self.sign * scaled)

    def scaled(self, value: float) -> float:
        """The logarithm of value / limit, so that 0 is the bound; of a count -0.5, or 0.5 and more beyond."""
        if math.isnan(value):
            return math.nan
        if self.counted:
            excess = value - self.limit
            return -0.5 if excess <= 0 else 0.5 + math.log1p(excess) / 4
        return self.sign * math.log(min(max(value, 1e-9), 1e9) / self.limit)


class Surrogates:
    """The processes behind a history, each fitted when it is first asked for."""

    def __init__(
        self, history: History, prior: Prior | None = None, earlier: Surrogates | None = None
    ) -> None:
        """``earlier``: those of the same prior, of which is kept what would come out the same."""
        self.history, self.prior = history, prior
        self.objective = ModelledMetric.of(history.objective)
        self.bounds = (*map(ModelledMetric.of, history.bounds), *map(ModelledMetric.of, history.relative))
        self._told = [r for r in history.launched if r.measurement is not None]
        self._request_sets = np.array([float(r.request_set) for r in self._told])
        self._processes: dict[ModelledMetric, GaussianProcess | None] = {}
        self._simulated = len(prior.known) if prior else 0
        kept = earlier is not None and earlier._simulated == self._simulated
        self._surfaces: dict[ModelledMetric, tuple[GaussianProcess, float] | None] = (
            earlier._surfaces if earlier and kept else {}
        )
        self._shapes: dict[tuple[ModelledMetric, str, int], Hyperparameters] = (
            earlier._shapes if earlier else {}
        )

    def with_pending(self, running: Sequence[Config]) -> Surrogates:
        """As if these configs had measured what is expected of them (see ``gp.py``)."""
        if not running:
            return self
        x, found = encode(self.history.space, running), copy(self)
        found._processes = {
            figure: process.with_fantasies(self._asked(figure, x)) if process else None
            for figure in (self.objective, *self.bounds)
            for process in [self._process(figure)]
        }
        return found

    def expected(self, x: Array, figure: ModelledMetric | None = None) -> tuple[Array, Array]:
        """(means, standard deviations) of a figure's scaled value, by default the objective's."""
        figure = figure or self.objective
        process = self._process(figure)
        if process is None:
            return np.zeros(len(x)), np.ones(len(x))
        against = self._asked(figure, self._baseline) if figure.relative else None
        mean, deviation = process(self._asked(figure, x), against)
        return (mean - figure.sign * math.log(figure.limit) if figure.relative else mean), deviation

    def log_feasible(self, x: Array, slack: float | None = None) -> Array:
        """Logarithm of the chance that a server that comes up holds every bound: by ``slack``, in logarithm;
        None: by what one run scatters, as what is recommended should."""
        total = np.zeros(len(x))
        for figure in self.bounds:
            if self._process(figure) is None:  # no trial has the figure, or no trial missed it
                continue
            mean, deviation = self.expected(x, figure)
            kept = figure.distance if slack is None else slack
            total += log_ndtr((-kept - mean) / deviation)
        return total

    def log_serves(self, codes: Codes) -> Array:
        """Logarithm of the chance that a server comes up, by the prior; failures that were seen are proof.

        ``codes`` (m, d): see ``crashes.codes_of``.
        """
        failed = [(p.config, p.failure) for p in self.prior.known.values() if p.failure] if self.prior else []
        crashes = Crashes(self.history.space, failed, [r.config for r in self._told])
        return np.where(crashes.forbidden(codes), math.log(P_SERVES_DESPITE_PRIOR), 0.0)

    def prior_weight(self) -> float:
        """What the prior has earned: MAX_PRIOR_WEIGHT at first, then the rank correlation of its objective
        with the measured one, as more and more trials tell.
        """
        assert self.prior is not None, "only a prior has a weight"
        figure, known = self.objective, self.prior.known
        shift = self._short_to_whole(figure, self._told)
        pairs = [
            (figure.scaled(prediction.values[figure.name]), self._reading(r, figure, shift)[0])
            for r in self._told
            if (prediction := known.get(config_key(r.config))) and figure.name in prediction.values
        ]
        ranks = [np.argsort(np.argsort(values)) for values in zip(*pairs, strict=True)]
        if len(pairs) < 3 or len({y for _, y in pairs}) < 2:
            return MAX_PRIOR_WEIGHT
        correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1])
        return min(
            MAX_PRIOR_WEIGHT,
            max(
                1 - MAX_PRIOR_WEIGHT,
                (PRIOR_PSEUDO_TRIALS + correlation * len(pairs)) / (PRIOR_PSEUDO_TRIALS + len(pairs)),
            ),
        )

    def figures(self, x: Array) -> dict[str, float]:
        """What a config at ``x`` (1, d) is expected to measure, by the figure's name."""
        found = {}
        for figure in (*self.bounds, self.objective):
            process = None if figure.counted else self._process(figure)
            if process is not None:
                level = float(process(self._asked(figure, x))[0][0])
                found[figure.name] = figure.value(level - figure.sign * self._offset(figure))
        return found

    @staticmethod
    def _offset(figure: ModelledMetric) -> float:
        return math.log(figure.limit) if figure.relative else 0.0

    @cached_property
    def _x(self) -> Array:
        return encode(self.history.space, [r.config for r in self._told])

    @cached_property
    def _baseline(self) -> Array:
        return encode(self.history.space, [self.history.space.baseline])

    def _asked(self, figure: ModelledMetric, x: Array) -> Points:
        """As they would be measured in a trial, under the set of requests that all trials share."""
        return self._points(figure, x, np.zeros(len(x)))

    def _points(self, figure: ModelledMetric, x: Array, request_sets: Array) -> Points:
        among = figure.relative or figure == self.objective  # configs are compared, not held against a limit
        parts = request_sets if among and self._request_sets.any() else None
        surface = self._surface(figure)
        if surface is None:
            return Points(x, request_sets=parts)
        process, level = surface
        return Points(x, process.means(Points(x)) - level, parts)

    def _process(self, figure: ModelledMetric) -> GaussianProcess | None:
        if figure not in self._processes:
            self._processes[figure] = self._fitted(figure)
        return self._processes[figure]

    def _fitted(self, figure: ModelledMetric) -> GaussianProcess | None:
        """None where no trial has the figure, or none of them tells anything."""
        told = self._rows(figure, self._told)
        if told is None:
            return None
        points, y, variances = told
        few = deciding_points(len(self._told))
        shape = self._shapes.get((figure, "trials", few))
        if shape is None:
            earlier = self._rows(figure, self._told[:few]) or told
            shape = self._shapes[figure, "trials", few] = most_probable(*earlier, noise=figure.scatter)
        return fit(points, y, variances, shape)

    def _rows(
        self, figure: ModelledMetric, told: Sequence[TrialResult]
    ) -> tuple[Points, Array, Array] | None:
        """(points, values, variances) for a fit to some trials."""
        shift = self._short_to_whole(figure, told)
        y, variances = np.array([self._reading(r, figure, shift) for r in told]).reshape(-1, 2).T
        there = np.isfinite(y)
        if not there.any() or (
            figure.counted and y[there].max() < 0
        ):  # nothing to learn: every trial held it
            return None
        if figure in self.bounds and not figure.relative:
            y = np.minimum(y, MAX_LOG_VIOLATION)
        points = self._points(figure, self._x[: len(told)][there], self._request_sets[: len(told)][there])
        return points, y[there], variances[there]

    def _surface(self, figure: ModelledMetric) -> tuple[GaussianProcess, float] | None:
        """The prior's figure over the space, interpolated between what was simulated; and its level."""
        if self.prior is None:
            return None
        if figure not in self._surfaces:
            rows = [
                (p.config, y)
                for p in self.prior.known.values()
                if math.isfinite(y := self._absolute(figure, p.values.get(figure.name, math.nan)))
            ]
            self._surfaces[figure] = None
            if len(rows) > 1:
                x = encode(self.history.space, [config for config, _ in rows])
                values = np.array([y for _, y in rows])
                few = deciding_points(len(rows))
                at = figure, "prior", few
                if at not in self._shapes:
                    self._shapes[at] = most_probable(Points(x[:few]), values[:few])
                process = fit(Points(x), values, shape=self._shapes[at])
                self._surfaces[figure] = process, float(values.mean())
        return self._surfaces[figure]

    def _absolute(self, figure: ModelledMetric, value: float) -> float:
        """Scaled, but not against the baseline's."""
        return figure.scaled(value) + figure.sign * self._offset(figure)

    def _reading(
        self, result: TrialResult, figure: ModelledMetric, shift: tuple[float, float]
    ) -> tuple[float, float]:
        """(the figure over a whole run, its own variance). ``shift``: see :meth:`_short_to_whole`."""
        assert result.measurement is not None
        reading = result.measurement.reading(figure.metric, figure.cls)
        y, variance = self._absolute(figure, self._value(result.measurement, figure)), _variance(reading)
        if result.status == "measured":
            return y, variance
        added, spread = shift
        return y + added, variance + spread

    def _value(self, measurement: Measurement, figure: ModelledMetric) -> float:
        return measurement.reading(figure.metric, figure.cls).value

    def _short_to_whole(self, figure: ModelledMetric, told: Sequence[TrialResult]) -> tuple[float, float]:
        """(median, variance) of what the whole measurement adds to the short rung, where both are known."""

        def scaled(measurement: Measurement) -> float:
            return figure.scaled(self._value(measurement, figure))

        both = [(r.short, r.measurement) for r in told if r.status == "measured"]
        added = [scaled(whole) - scaled(short) for short, whole in both if short and whole]
        added = [a for a in added if math.isfinite(a)]
        if not added:
            return 0.0, SHORT_RUNG_LOG_SD**2
        spread = float(np.var(added)) if len(added) > 2 else 0.0
        return float(np.median(added)), max(spread, SHORT_RUNG_LOG_SD**2)


def _variance(reading: Reading) -> float:
    """Of a reading's logarithm, by its interval; 0 where it has none."""
    if not reading.value > 0 or math.isnan(reading.high) or math.isnan(reading.low):
        return 0.0
    if math.isinf(reading.high) or reading.low <= 0:
        return OPEN_INTERVAL_LOG_SD**2
    return (OWN_NOISE_SHARE * math.log(reading.high / reading.low) / 4) ** 2
