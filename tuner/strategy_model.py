"""The search's own strategy: Gaussian processes for the objective and every bound, and a region of crashes.

Each figure is modelled in logarithms over the rungs of the ladders. What is proposed is the config with the
highest expected improvement over the best feasible one, times the chance that it holds every bound (Gardner
et al. 2014, "Bayesian optimization with inequality constraints"); while nothing is feasible yet, the one
with the best chance. Trials that were stopped early count as well, corrected by how the whole measurement
compares with the short rung where both are known. With a prior (``prior.py``), the processes model what it
misses, and the favourites are simulated before one of them is launched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import log_ndtr, ndtr

from loadgen.slo import COUNTS, Bound, format_value, name_of
from tuner.crashes import Crashes
from tuner.gp import Array, GaussianProcess, fit
from tuner.prior import Prior
from tuner.result import Measurement, TrialResult
from tuner.space import Axis, Config, Space, Value, config_key
from tuner.strategy import History, Strategy, Suggestion

POOL = 4096
"""Configs that are weighed: a whole space of so many, else a random part and the best one's neighbours."""
SLACK = 0.05
"""Relative distance to a bound that a config is wanted to keep."""
SIMPLER = 0.02
"""By how much (in logarithm) a change must raise the expected improvement to be worth it."""
STOPPED = 0.1
"""Standard deviation of a short rung's logarithm against the whole, where no trial tells."""
FAR = 1.5
"""Logarithms further than this beyond a bound are all alike: far."""
BROKEN = 0.3
"""Chance that a server serves although the prior says that its memory does not suffice."""
FIRST_ASKED, FAVOURITES, ROUNDS = 32, 8, 4
"""Simulated configs: spread at first, then of the favourites of every round."""
SURE = 0.02
"""Standard deviation of a figure in the simulation, as a logarithm: it is deterministic, but not smooth."""


class ModelStrategy(Strategy):
    """See the module. ``prior``: None to begin with what is measured."""

    def __init__(self, seed: int = 0, prior: Prior | None = None) -> None:
        super().__init__(seed)
        self.prior = prior
        self._points: dict[str, Array] = {}

    def propose(self, history: History) -> Suggestion | None:
        pool = self._pool(history)
        if not pool:
            return None
        if self.prior and not any(r.measurement for r in history.results):
            return Suggestion({}, "random: nothing has served yet")
        if self.prior:
            self._ask_first(history, pool)
        view = View(history, pool, self._encode(history.space, pool), self)
        for _ in range(ROUNDS if self.prior else 0):
            assert self.prior is not None
            ranked = np.argsort(-view.scores, kind="stable")[:FAVOURITES]
            known = config_key(pool[ranked[0]]) in self.prior.known
            if known or not self.prior.ask(pool[i] for i in ranked):
                break
            view = View(history, pool, view.points, self)
        chosen = int(np.argmax(view.scores))
        return Suggestion(history.space.params(pool[chosen]), view.reason(chosen), view.figures(chosen))

    def _pool(self, history: History) -> list[Config]:
        """Configs that may be launched, each once."""
        space, rng = history.space, self.rng(history)
        drawn: list[Config] = list(space.draw(rng, POOL))
        if space.size > POOL and history.best is not None:
            drawn += neighbours(space, history.best.config)
        crashes = Crashes.learnt(space, history.results)
        fresh = {key: c for c in drawn if (key := config_key(c)) not in history.taken}
        return [c for c in fresh.values() if not space.refusals(c) and not crashes.forbids(c)]

    def _ask_first(self, history: History, pool: Sequence[Config]) -> None:
        assert self.prior is not None
        self.prior.ask(r.config for r in history.launched)
        if len(self.prior.known) < FIRST_ASKED:
            spread = self.rng(history).sample(pool, min(FIRST_ASKED, len(pool)))
            self.prior.ask(spread)

    def _encode(self, space: Space, configs: Sequence[Config]) -> Array:
        return np.array([self.point(space, config) for config in configs])

    def point(self, space: Space, config: Config) -> Array:
        """The config as a point in the unit cube: a dimension an ordered axis, one a value of the others."""
        key = config_key(config)
        if key not in self._points:
            params = space.params(config)
            self._points[key] = np.array([c for a in space.axes for c in _coordinates(a, params.get(a.name))])
        return self._points[key]


def _coordinates(axis: Axis, value: object) -> list[float]:
    if not axis.ordered:
        return [float(value == other) / 2 for other in axis.values]
    if value is None:  # it depends on another that is off
        return [0.5]
    assert isinstance(value, int)
    return [value / max(len(axis.values) - 1, 1)]


def neighbours(space: Space, config: Config) -> Iterator[Config]:
    """Configs that differ from ``config`` in one axis, or by one rung in two."""
    own = space.params(config)
    params = {axis.name: own.get(axis.name, _values(axis)[len(axis.values) // 2]) for axis in space.axes}
    steps: list[tuple[str, Value]] = []
    for axis in space.axes:
        at = params[axis.name]
        for to in _values(axis):
            yield space.config({**params, axis.name: to})
            if isinstance(to, int) and isinstance(at, int) and abs(to - at) == 1:
                steps.append((axis.name, to))
    for (first, to), (second, other) in itertools.combinations(steps, 2):
        yield space.config({**params, first: to, second: other})


def _values(axis: Axis) -> Sequence[Value]:
    """Every parameter of the axis."""
    return range(len(axis.values)) if axis.ordered else axis.values


@dataclass(frozen=True)
class Figure:
    """One figure that is modelled, as a number that should be small: the objective, or a bound's excess."""

    metric: str
    cls: str | None
    sign: int
    """-1 for one that should be large."""
    limit: float = 1.0

    @classmethod
    def of_bound(cls, bound: Bound) -> Figure:
        return cls(bound.metric, bound.cls, 1 if bound.op == "<=" else -1, bound.limit)

    @property
    def name(self) -> str:
        return name_of(self.metric, self.cls)

    @property
    def counted(self) -> bool:
        return self.metric in COUNTS

    def value(self, scaled: float) -> float:
        """The value that ``scaled`` stands for; not for counts."""
        return self.limit * math.exp(self.sign * scaled)

    def scaled(self, value: float) -> float:
        """The logarithm of value / limit, so that 0 is the bound; for counts, 0.5 beyond and more."""
        if self.counted:
            excess = value - self.limit
            return -0.5 if excess <= 0 else 0.5 + math.log1p(excess) / 4
        if math.isnan(value):
            return math.nan
        return self.sign * math.log(min(max(value, 1e-9), 1e9) / max(self.limit, 1e-9))


class View:
    """What the models say of a pool of configs, given a history."""

    def __init__(
        self, history: History, pool: Sequence[Config], points: Array, strategy: ModelStrategy
    ) -> None:
        self.history, self.pool, self.points, self._strategy = history, pool, points, strategy
        self.told = [r for r in history.launched if r.measurement is not None]
        self._models: dict[Figure, tuple[Array, Array]] = {}

    @cached_property
    def objective(self) -> Figure:
        wanted = self.history.objective
        return Figure(wanted.metric, wanted.cls, 1 if wanted.direction == "minimize" else -1)

    @cached_property
    def expected(self) -> tuple[Array, Array]:
        """Of the objective: means and standard deviations, by config."""
        return self._model(self.objective)

    @cached_property
    def log_feasible(self) -> Array:
        """Logarithm of the chance that a config serves and holds every bound."""
        total = np.zeros(len(self.pool))
        for bound in self.history.bounds:
            figure = Figure.of_bound(bound)
            mean, deviation = self._model(figure)
            total += log_ndtr((-SLACK - mean) / deviation)
        if prior := self._strategy.prior:
            failed = [(p.config, p.failure) for p in prior.known.values() if p.failure]
            crashes = Crashes(self.history.space, failed, [r.config for r in self.told])
            if failed:
                total += [math.log(BROKEN) if crashes.forbids(config) else 0.0 for config in self.pool]
        return total

    @cached_property
    def scores(self) -> Array:
        changes = np.array([len(self.history.space.changes(config)) for config in self.pool])
        return self._gain + self.log_feasible - SIMPLER * changes

    @property
    def _gain(self) -> Array:
        """Logarithm of the expected improvement; flat while nothing is feasible."""
        mean, deviation = self.expected
        best = self.history.best
        if best is None:
            return -0.1 * mean
        z = (self.objective.scaled(best.value(self.history.objective)) - mean) / deviation
        improvement = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        return np.log(np.maximum(improvement, 1e-300))

    def figures(self, chosen: int) -> dict[str, float]:
        """What this one is expected to measure, by the figure's name."""
        bounded = [figure for figure in map(Figure.of_bound, self.history.bounds) if not figure.counted]
        return {f.name: f.value(float(self._model(f)[0][chosen])) for f in (*bounded, self.objective)}

    def reason(self, chosen: int) -> str:
        """Why this one, for people."""
        figure = format_value(self.objective.metric, self.objective.value(float(self.expected[0][chosen])))
        chance = math.exp(float(self.log_feasible[chosen]))
        return f"model: {self.objective.name} about {figure}, feasible with {chance:.0%}"

    def _model(self, figure: Figure) -> tuple[Array, Array]:
        if figure not in self._models:
            self._models[figure] = self._modelled(figure)
        return self._models[figure]

    def _modelled(self, figure: Figure) -> tuple[Array, Array]:
        rows = [(r, y, v) for r in self.told for y, v in [self._reading(r, figure)] if math.isfinite(y)]
        if not rows:
            return np.zeros(len(self.pool)), np.ones(len(self.pool))
        space = self.history.space
        x = np.array([self._strategy.point(space, r.config) for r, _, _ in rows])
        y = np.array([y for _, y, _ in rows])
        variances = np.array([v for _, _, v in rows])
        if figure != self.objective:
            y = np.minimum(y, FAR)
        surface = self._surface(figure)
        if surface is None:
            return fit(x, y, variances)(self.points)
        ahead = surface(self.points)[0]
        level = float(ahead.mean())
        process = fit(x, y, variances, surface(x)[0] - level)
        return process(self.points, ahead - level)

    def _surface(self, figure: Figure) -> GaussianProcess | None:
        """The prior's figure over the space, interpolated between what was simulated."""
        prior, space = self._strategy.prior, self.history.space
        if prior is None:
            return None
        rows = [
            (self._strategy.point(space, p.config), y)
            for p in prior.known.values()
            if math.isfinite(y := figure.scaled(p.values.get(figure.name, math.nan)))
        ]
        if len(rows) < 2:
            return None
        return fit(np.array([x for x, _ in rows]), np.array([y for _, y in rows]))

    def _reading(self, result: TrialResult, figure: Figure) -> tuple[float, float]:
        """(the figure over a whole run, its extra variance)."""
        assert result.measurement is not None
        y = figure.scaled(result.measurement.value(figure.metric, figure.cls))
        if result.status == "measured":
            return y, 0.0
        shift, variance = self._short_to_whole(figure)
        return y + shift, variance

    def _short_to_whole(self, figure: Figure) -> tuple[float, float]:
        """(mean, variance) of what the whole measurement adds to the short rung, where both are known."""

        def scaled(measurement: Measurement) -> float:
            return figure.scaled(measurement.value(figure.metric, figure.cls))

        both = [(r.short, r.measurement) for r in self.told if r.status == "measured"]
        added = [scaled(whole) - scaled(short) for short, whole in both if short and whole]
        added = [a for a in added if math.isfinite(a)]
        if not added:
            return 0.0, STOPPED**2
        spread = float(np.var(added)) if len(added) > 2 else 0.0
        return float(np.median(added)), max(spread, STOPPED**2)
