"""The search's own strategy: what trials teach (``surrogates.py``), and where servers crash (``crashes.py``).

What is proposed is the config with the highest expected improvement over the best one, times the chance that
it holds every bound (Gardner et al. 2014, "Bayesian optimization with inequality constraints"); while nothing
is feasible yet, the one with the best chance. What is best so far the models say too, for a single
measurement that is good by luck is not followed by its neighbours. With a prior, the favourites are simulated
before one of them is launched. Configs that other workers measure count as if they came out as expected, so
that no worker looks for what another is about to find.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from servers.slo.bounds import format_value
from tuner.runs.result import TrialResult
from tuner.search.crashes import Crashes
from tuner.search.from_doctor import Hints
from tuner.search.gp import Array
from tuner.search.inactive_knobs import inactive
from tuner.search.pool import CandidatePool, CandidatePools, encode
from tuner.search.prior import Prior
from tuner.search.strategy import (
    EXPECTED_GAIN,
    MIN_SLACK,
    History,
    Strategy,
    Suggestion,
    by_measurement,
)
from tuner.search.surrogates import Surrogates
from tuner.space.space import Config, Space, config_key

LOG_GAIN_PER_CHANGE = 0.1
"""By how much (in logarithm) a change must raise the expected improvement to be worth it."""
MIN_LOG_GAIN = 0.02
"""The least improvement (in logarithm) that is worth a launch: else knobs without effect look promising."""
MIN_P_FEASIBLE = 0.8
"""Chance of holding every bound from which on the objective decides what is best."""
MAX_P_TO_REPEAT, MIN_LOG_GAIN_TO_REPEAT = 0.95, 0.02
"""A chance to hold every bound below which a repeat is worth it; and an expected gain (in logarithm)."""
TIE_LOG_RATIO = 0.02
"""Expected objectives closer than this (in logarithm) are a tie, which the simpler config wins."""
STOP_LOG_GAIN, STOP_PROPOSALS = 0.005, 3
"""The search ends when the config that it favours is expected to gain less than this (in logarithm, beyond
MIN_LOG_GAIN), so many times in a row: one proposal alone may mistake what it does not know for nothing."""
FIRST_SIMULATED, SIMULATED_PER_ROUND, MAX_ROUNDS = 32, 8, 4
"""Simulated configs: spread at first, then of the favourites of every round."""


class ModelStrategy(Strategy):
    """See the module. ``prior``: None to begin with what is measured. ``hints``: where to look first."""

    def __init__(self, seed: int = 0, prior: Prior | None = None, hints: Hints | None = None) -> None:
        super().__init__(seed)
        self.prior, self.hints = prior, hints
        # What is kept between two calls only saves time: it follows from the history.
        self._pools: CandidatePools | None = None
        self._held: dict[bool, tuple[tuple[int, ...], Surrogates]] = {}

    @property
    def starts(self) -> int:
        """One, so that the models have something to begin with; a prior says more."""
        return 0 if self.prior else 1

    def propose(self, history: History) -> Suggestion | None:
        pool, serves = self._pool(history)
        if self.prior:
            self._ask_first(history, pool)
        if self.hints is not None and len(history.launched) <= self.hints.until:
            hinted = self.hints.allow(history.space, pool.codes) if len(pool) else np.zeros(0, dtype=bool)
            if suggestion := self._favourite(history, pool.only(hinted), serves[hinted]):
                return suggestion
        return self._favourite(history, pool, serves)

    def _favourite(self, history: History, pool: CandidatePool, serves: Array) -> Suggestion | None:
        """The best of the pool; None where none is worth a launch."""
        if not len(pool):
            return None
        scores = self._scores(history, pool, serves)
        for _ in range(MAX_ROUNDS if self.prior else 0):
            assert self.prior is not None
            ranked = np.argsort(-scores, kind="stable")[:SIMULATED_PER_ROUND]
            known = pool.rows[ranked[0]].key in self.prior.known
            if known or not self.prior.ask(pool.rows[i].config for i in ranked):
                break
            scores = self._scores(history, pool, serves)
        expected: dict[str, float] = {}
        if history.best is not None:
            expected[EXPECTED_GAIN] = math.exp(float(np.max(scores + LOG_GAIN_PER_CHANGE * pool.changes)))
            if self._over(history, expected[EXPECTED_GAIN]):
                self.exhausted = f"no config left is expected to gain more than {expected[EXPECTED_GAIN]:.1%}"
                return None
        chosen = int(np.argmax(scores))
        surrogates, x = self.surrogates(history), pool.x[chosen : chosen + 1]
        return Suggestion(
            history.space.params(pool.rows[chosen].config),
            _reason(surrogates, x),
            expected | surrogates.figures(x),
        )

    def _over(self, history: History, gain: float) -> bool:
        """Whether the last proposals promised as little as this one."""
        told = [r.expected[EXPECTED_GAIN] for r in history.launched if EXPECTED_GAIN in r.expected]
        last = [*told, gain][-STOP_PROPOSALS:]
        return len(last) == STOP_PROPOSALS and max(last) < STOP_LOG_GAIN

    def close(self, history: History) -> list[TrialResult]:
        """The best config that is likely to hold its bounds, unless it is the baseline, and those that a
        repeat could show to be better, or to hold their bounds after all.
        """
        whole = (r for r in history.results if r.status == "measured")
        told = [r for r in whole if math.isfinite(r.value(history.objective))]
        measured = list({config_key(r.config): r for r in reversed(told)}.values())
        if not measured:
            return []
        surrogates = self.surrogates(history, plain=True)
        x = self._pools_of(history.space).of(r.config for r in measured).x
        chances = np.exp(surrogates.log_feasible(x, MIN_SLACK))
        costs, deviations = surrogates.expected(x)
        changed = np.array([bool(history.space.changes(r.config)) for r in measured])
        chances[~changed] = float(history.baseline is not None and history.baseline.feasible)
        best = int(np.argmin(np.where(chances >= MIN_P_FEASIBLE, costs, np.inf)))
        if chances[best] < MIN_P_FEASIBLE:  # then whatever holds its bounds is better
            gains = chances
        else:
            gains = chances * _improvement(costs[best] - costs, deviations)
            gains[best] = 0.0
        ranked = [
            i for i in np.argsort(-gains, kind="stable") if changed[i] and gains[i] >= MIN_LOG_GAIN_TO_REPEAT
        ]
        known = changed[best] and chances[best] >= MIN_P_FEASIBLE
        if known and (ranked or chances[best] < MAX_P_TO_REPEAT):
            ranked.insert(0, best)  # for it is compared with them under the same requests
        return [measured[i] for i in ranked]

    def rank(self, history: History) -> list[TrialResult]:
        """Feasible configs, the best first: by the gain in the objective times the chance to hold every
        bound, as the models, without the prior, expect both after all measurements, less the price of each
        change.

        Of ten measurements that scatter the best is the luckiest one, and fresh runs refuse it.
        """
        ranked = by_measurement(history)
        changed = [r for r in ranked if history.space.changes(r.config)]
        if not changed:
            return ranked
        surrogates = self.surrogates(history, plain=True)
        x = encode(history.space, [history.space.baseline, *(r.config for r in changed)])
        costs, _ = surrogates.expected(x)
        worth = (costs[0] - costs[1:]) * np.exp(surrogates.log_feasible(x[1:]))
        price = LOG_GAIN_PER_CHANGE * np.array([len(history.space.changes(r.config)) for r in changed])
        order = np.argsort(price - worth, kind="stable")
        own = [r for r in ranked if r not in changed]
        better, rest = ([changed[i] for i in order if (worth[i] > 0) == wanted] for wanted in (True, False))
        return [*better, *own, *rest]

    def without_inactive(self, history: History, config: Config) -> Config:
        """One change after the other is left out, where that may cost nothing for all that is known."""
        space, surrogates = history.space, self.surrogates(history, plain=True)

        def expected(config: Config) -> tuple[float, float, float]:
            x = encode(space, [config])
            cost, deviation = surrogates.expected(x)
            return float(cost[0]), float(deviation[0]), float(surrogates.log_feasible(x)[0])

        cost, _, chance = expected(config)
        for flag in reversed([flag for flag in space.flags if flag in space.changes(config)]):
            simpler = {**config, flag: space.baseline[flag]}
            if not space.refusals(simpler):
                its_cost, deviation, its_chance = expected(simpler)
                if its_cost <= cost + max(TIE_LOG_RATIO, deviation) and its_chance >= min(
                    chance, math.log(MIN_P_FEASIBLE)
                ):
                    config = simpler
        return config

    def surrogates(self, history: History, plain: bool = False) -> Surrogates:
        """Of what was measured, and of what runs. ``plain``: without the prior.

        Those of the last history are kept, for it is asked about several times.
        """
        prior = None if plain else self.prior
        known = len(prior.known) if prior else 0
        key = (known, len(history.bounds), len(history.relative), *(r.number for r in history.results))
        held = self._held.get(plain)
        if held is None or held[0] != key:
            held = self._held[plain] = key, Surrogates(history, prior, held[1] if held else None)
        return held[1].with_pending(history.running)

    def _scores(self, history: History, pool: CandidatePool, serves: Array) -> Array:
        """Logarithms of what a trial of each is expected to gain. ``serves``: the chance that each comes up.

        A prior and none are averaged, by how much the prior has earned: where a wrong one sees nothing to
        gain any more, or no chance, the search goes on as if there were none.
        """
        surrogates = self.surrogates(history)
        gain = self._log_gain(history, surrogates, pool.x) + surrogates.log_feasible(pool.x)
        if self.prior:
            plain, weight = self.surrogates(history, plain=True), surrogates.prior_weight()
            without = self._log_gain(history, plain, pool.x) + plain.log_feasible(pool.x)
            gain = np.logaddexp(
                math.log(weight) + gain + surrogates.log_serves(pool.codes), math.log(1 - weight) + without
            )
        return gain + np.log(serves) - LOG_GAIN_PER_CHANGE * pool.changes

    def _log_gain(self, history: History, surrogates: Surrogates, x: Array) -> Array:
        """Logarithm of the expected improvement; flat while nothing is feasible."""
        mean, deviation = surrogates.expected(x)
        best = self._to_beat(history, surrogates)
        if best is None:
            return -0.1 * mean
        return np.log(np.maximum(_improvement(best - MIN_LOG_GAIN - mean, deviation), 1e-300))

    def _to_beat(self, history: History, surrogates: Surrogates) -> float | None:
        """The best objective that is expected of the best config, or of one that runs and is believed to hold
        every bound; None while there is neither.
        """
        known = [] if history.best is None else [history.best.config]
        if history.running:
            chances = np.exp(surrogates.log_feasible(encode(history.space, history.running)))
            known += [
                c for c, chance in zip(history.running, chances, strict=True) if chance >= MIN_P_FEASIBLE
            ]
        return float(surrogates.expected(encode(history.space, known))[0].min()) if known else None

    def _pool(self, history: History) -> tuple[CandidatePool, Array]:
        """Configs that may be launched and do something, each once; the chance that its server comes up."""
        near = history.best.config if history.best else None
        pool = self._pools_of(history.space).fresh(self.rng(history), history.taken, near)
        if not len(pool):
            return pool, np.ones(0)
        crashes = Crashes.learnt(history.space, history.results)
        fails, useless = crashes.forbidden(pool.codes), inactive(history.space, history.launched, pool.codes)
        may = ~(fails | useless)
        if not may.any():
            self.exhausted = _none_left(bool(useless.any()), bool(fails.any()))
        return pool.only(may), crashes.chance(pool.codes[may])

    def _pools_of(self, space: Space) -> CandidatePools:
        if self._pools is None or self._pools.space is not space:
            self._pools = CandidatePools(space)
        return self._pools

    def _ask_first(self, history: History, pool: CandidatePool) -> None:
        assert self.prior is not None
        self.prior.ask(r.config for r in history.launched)
        if len(self.prior.known) < FIRST_SIMULATED:
            spread = self.rng(history).sample(pool.rows, min(FIRST_SIMULATED, len(pool)))
            self.prior.ask(row.config for row in spread)


def _none_left(useless: bool, fails: bool) -> str:
    """Why none of the configs that were not tried may be launched."""
    whys = ["change the KV pool or the sequence slots, which are never short"] if useless else []
    whys += ["would fail for memory, as others did"] if fails else []
    return f"the configs that are left {', or '.join(whys)}"


def _improvement(by: Array, deviation: Array) -> Array:
    """What is expected of normal variables where they are above 0, by their means and deviations."""
    z = by / deviation
    found: Array = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    return found


def _reason(surrogates: Surrogates, x: Array) -> str:
    """Why this one, for people."""
    objective = surrogates.objective
    value = surrogates.figures(x).get(objective.name)
    if value is None:
        return "model: nothing is known yet"
    chance = math.exp(float(surrogates.log_feasible(x)[0]))
    return (
        f"model: {objective.name} about {format_value(objective.metric, value)}, feasible with {chance:.0%}"
    )
