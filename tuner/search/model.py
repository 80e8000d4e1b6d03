"""The search's own strategy: what trials teach (``beliefs.py``), and where servers crash (``crashes.py``).

What is proposed is the config with the highest expected improvement over the best one, times the chance that
it holds every bound (Gardner et al. 2014, "Bayesian optimization with inequality constraints"); while nothing
is feasible yet, the one with the best chance. What is best so far the models say too, for a single
measurement that is good by luck is not followed by its neighbours. With a prior, the favourites are simulated
before one of them is launched.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.special import ndtr

from loadgen.slo import format_value
from tuner.runs.result import TrialResult
from tuner.search.beliefs import Beliefs, encode
from tuner.search.crashes import Crashes
from tuner.search.gp import Array
from tuner.search.prior import Prior
from tuner.search.strategy import History, Strategy, Suggestion
from tuner.space.space import Axis, Config, Space, Value, config_key

POOL = 4096
"""Configs that are weighed: a whole space of so many, else a random part and the best one's neighbours."""
SIMPLER = 0.1
"""By how much (in logarithm) a change must raise the expected improvement to be worth it."""
WORTH = 0.04
"""The least improvement (in logarithm) that is worth a launch: else knobs without effect look promising."""
SURE = 0.8
"""Chance of holding every bound from which on the objective decides what is best."""
TIE = 0.02
"""Expected objectives closer than this (in logarithm) are a tie, which the simpler config wins."""
FIRST_ASKED, FAVOURITES, ROUNDS = 32, 8, 4
"""Simulated configs: spread at first, then of the favourites of every round."""


class ModelStrategy(Strategy):
    """See the module. ``prior``: None to begin with what is measured."""

    def __init__(self, seed: int = 0, prior: Prior | None = None) -> None:
        super().__init__(seed)
        self.prior = prior
        # What is kept between two calls only saves time: it follows from the history.
        self._allowed: dict[str, Config] | None = None
        self._rows: dict[str, Array] = {}
        self._held: tuple[tuple[int, ...], Beliefs] | None = None
        self._ranked: tuple[Beliefs, list[TrialResult]] | None = None

    @property
    def starts(self) -> int:
        """One, so that the models have something to begin with; a prior says more."""
        return 0 if self.prior else 1

    def propose(self, history: History) -> Suggestion | None:
        pool = self._pool(history)
        if not pool:
            return None
        if self.prior:
            self._ask_first(history, pool)
        x = self._encoded(history.space, pool)
        scores = self._scores(history, pool, x)
        for _ in range(ROUNDS if self.prior else 0):
            assert self.prior is not None
            ranked = np.argsort(-scores, kind="stable")[:FAVOURITES]
            known = config_key(pool[ranked[0]]) in self.prior.known
            if known or not self.prior.ask(pool[i] for i in ranked):
                break
            scores = self._scores(history, pool, x)
        chosen = int(np.argmax(scores))
        beliefs = self.beliefs(history)
        return Suggestion(
            history.space.params(pool[chosen]),
            _reason(beliefs, x[chosen : chosen + 1]),
            beliefs.figures(x[chosen : chosen + 1]),
        )

    def rank(self, history: History) -> list[TrialResult]:
        """By what the models expect of each: those that are likely to hold every bound first."""
        beliefs = self.beliefs(history)
        if self._ranked is None or self._ranked[0] is not beliefs:
            self._ranked = beliefs, self._rank(history, beliefs)
        return list(self._ranked[1])

    def _rank(self, history: History, beliefs: Beliefs) -> list[TrialResult]:
        measured = [r for r in history.results if r.feasible and math.isfinite(r.value(history.objective))]
        if not measured:
            return []
        x = self._encoded(history.space, [r.config for r in measured])
        chances, costs = np.exp(beliefs.log_feasible(x)), beliefs.expected(x)[0]
        chances[[not history.space.changes(r.config) for r in measured]] = 1.0  # the baseline holds its own
        rows = list(zip(measured, chances, costs, strict=True))
        sure = sorted((row for row in rows if row[1] >= SURE), key=lambda row: row[2])
        unsure = sorted((row for row in rows if row[1] < SURE), key=lambda row: -row[1])
        tied = [row for row in sure if row[2] <= sure[0][2] + TIE]
        tied.sort(key=lambda row: len(history.space.changes(row[0].config)))
        return [result for result, _, _ in (*tied, *sure[len(tied) :], *unsure)]

    def beliefs(self, history: History) -> Beliefs:
        """Those of the last history are kept: it is asked about several times."""
        known = len(self.prior.known) if self.prior else 0
        key = (known, len(history.bounds), len(history.relative), *(r.number for r in history.results))
        if self._held is None or self._held[0] != key:
            self._held = key, Beliefs(history, self.prior, self._held[1] if self._held else None)
        return self._held[1]

    def _scores(self, history: History, pool: Sequence[Config], x: Array) -> Array:
        """Logarithms of what a trial of each is expected to gain.

        A prior and none are averaged, by how much the prior has earned: where a wrong one sees nothing to
        gain any more, or no chance, the search goes on as if there were none.
        """
        beliefs = self.beliefs(history)
        changes = np.array([len(history.space.changes(config)) for config in pool])
        crashes = Crashes.learnt(history.space, history.results)
        serves = np.log([crashes.chance(config) for config in pool])
        gain = self._log_gain(history, beliefs, x) + beliefs.log_feasible(x)
        if self.prior:
            plain, weight = Beliefs(history), beliefs.prior_weight()
            without = self._log_gain(history, plain, x) + plain.log_feasible(x)
            gain = np.logaddexp(
                math.log(weight) + gain + beliefs.log_serves(pool), math.log(1 - weight) + without
            )
        return gain + serves - SIMPLER * changes

    def _log_gain(self, history: History, beliefs: Beliefs, x: Array) -> Array:
        """Logarithm of the expected improvement; flat while nothing is feasible."""
        mean, deviation = beliefs.expected(x)
        if history.best is None:
            return -0.1 * mean
        best = beliefs.expected(encode(history.space, [history.best.config]))[0][0]
        z = (best - WORTH - mean) / deviation
        improvement = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
        return np.log(np.maximum(improvement, 1e-300))

    def _pool(self, history: History) -> list[Config]:
        """Configs that may be launched, each once."""
        space = history.space
        if self._allowed is None or space.size > POOL:
            drawn: list[Config] = list(space.draw(self.rng(history), POOL))
            if space.size > POOL and history.best is not None:
                drawn += neighbours(space, history.best.config)
            self._allowed = {config_key(c): c for c in drawn if not space.refusals(c)}
        crashes = Crashes.learnt(space, history.results)
        fresh = (c for key, c in self._allowed.items() if key not in history.taken)
        return [config for config in fresh if not crashes.forbids(config)]

    def _encoded(self, space: Space, pool: Sequence[Config]) -> Array:
        """As ``encode``, each config but once: most are in the next pool again."""
        keys = [config_key(config) for config in pool]
        if len(self._rows) > 10 * POOL:
            self._rows = {}
        fresh = {key: config for key, config in zip(keys, pool, strict=True) if key not in self._rows}
        if fresh:
            self._rows |= dict(zip(fresh, encode(space, list(fresh.values())), strict=True))
        return np.array([self._rows[key] for key in keys])

    def _ask_first(self, history: History, pool: Sequence[Config]) -> None:
        assert self.prior is not None
        self.prior.ask(r.config for r in history.launched)
        if len(self.prior.known) < FIRST_ASKED:
            self.prior.ask(self.rng(history).sample(pool, min(FIRST_ASKED, len(pool))))


def _reason(beliefs: Beliefs, x: Array) -> str:
    """Why this one, for people."""
    objective = beliefs.objective
    value = objective.value(float(beliefs.expected(x)[0][0]))
    chance = math.exp(float(beliefs.log_feasible(x)[0]))
    return (
        f"model: {objective.name} about {format_value(objective.metric, value)}, feasible with {chance:.0%}"
    )


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
