"""Who decides what is tried next: the seam between a study and a way of searching.

A strategy is a function of what was told: it keeps nothing between two calls, so that a study that is
resumed, or shared by many workers, goes on as if nothing had happened.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import optuna

from loadgen.measure.estimator import floor_of
from servers.slo.bounds import COUNTS, Bound
from servers.slo.objective import Objective, RelativeBound
from tuner.runs.result import BASELINE, SERVES, TrialResult
from tuner.search.repeats import merge_repeats
from tuner.space.space import Config, Space, Value, config_key

TIE_SHARE = 0.1
"""Objectives closer than this are a tie for one measurement each: the config with fewer changes wins."""
MIN_SLACK = 0.05
"""How far beyond its bounds a config may be in one measurement and yet hold them."""
EXPECTED_GAIN = "gain"
"""Beside the figures that are expected of a suggestion: by what share it should beat the best."""


@dataclass(frozen=True)
class Suggestion:
    """What to try. ``params``: by axis; those that are left out are the Optuna sampler's to choose."""

    params: Mapping[str, Value]
    origin: str
    expected: Mapping[str, float] = field(default_factory=dict)
    """Figures of the SLO that the config is expected to measure, by name."""


@dataclass(frozen=True)
class History:
    """What a study knows, for a strategy to decide on. ``results`` are those that came to something."""

    space: Space
    objective: Objective
    results: tuple[TrialResult, ...]
    taken: frozenset[str] = frozenset()
    """Keys (see config_key) of every config that was told, is queued, or runs somewhere."""
    bounds: tuple[Bound, ...] = ()
    relative: tuple[RelativeBound, ...] = ()
    best: TrialResult | None = None
    """The best feasible config so far."""
    running: tuple[Config, ...] = ()
    """Those that other workers measure now."""

    @property
    def launched(self) -> tuple[TrialResult, ...]:
        return tuple(r for r in self.results if r.launched)

    @property
    def baseline(self) -> TrialResult | None:
        return next((r for r in self.results if r.origin == BASELINE), None)

    def of(self, config: Config) -> TrialResult | None:
        """What came of ``config``; None where it was not tried."""
        key = config_key(config)
        return next((r for r in self.results if config_key(r.config) == key), None)


class Strategy(ABC):
    """Proposes one config after the other. A subclass says with ``exhausted`` why it has no more."""

    exhausted = "every config of the space was tried"

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    @property
    def starts(self) -> int:
        """How many of the published starting points it wants tried before it decides anything itself."""
        return 4

    @abstractmethod
    def propose(self, history: History) -> Suggestion | None:
        """What to try next; None: nothing is left that is worth a trial.

        A suggestion that breaks a rule or repeats a config costs no launch, and is asked for anew.
        """

    def rank(self, history: History) -> list[TrialResult]:
        """Feasible configs, the user's own among them, the best first. By default by what each measured."""
        return by_measurement(history)

    def without_inactive(self, history: History, config: Config) -> Config:
        """``config`` less the changes that are not expected to do anything. By default nothing is known."""
        return config

    def close(self, history: History) -> list[TrialResult]:
        """Measured configs of which a repeat could change what is recommended, the likeliest first; empty
        where the best one is clear. By default those that tie with the best and hold, or nearly hold, every
        bound, unless that is the best alone and it keeps its distance.
        """
        objective, space = history.objective, history.space
        told = [
            r for r in merge_repeats(history.results) if r.status == "measured" and space.changes(r.config)
        ]
        near = [r for r in told if r.slack >= -MIN_SLACK and math.isfinite(r.value(objective))]
        near.sort(key=lambda r: _cost(r, objective))
        tied = [r for r in near if _tied(r, near[0], objective)]
        return [] if len(tied) == 1 and _keeps_distance(tied[0]) else tied

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Fills in what suggestions leave out."""
        return optuna.samplers.RandomSampler(seed)

    def rng(self, history: History) -> random.Random:
        """The same for the same history."""
        return random.Random(self.seed * 100_003 + len(history.taken))


class RandomStrategy(Strategy):
    """Chance alone: what every other strategy has to beat."""

    def propose(self, history: History) -> Suggestion | None:
        return Suggestion({}, "random")


class TpeStrategy(Strategy):
    """Optuna's constrained TPE. Every other time it may move only FREE_AXES of the best config's parameters.

    In a space of many knobs a free proposal changes nearly all of them at once, most to no effect; and what
    is recommended in the end should change few.
    """

    FREE_AXES = 2
    STARTUP_TRIALS = 5
    """So many are told before the sampler's model replaces chance."""

    def propose(self, history: History) -> Suggestion | None:
        if history.best is None or len(history.results) % 2 == 0:
            return Suggestion({}, "sampler")
        params = history.space.params(history.best.config)
        for name in self.rng(history).sample(sorted(params), min(self.FREE_AXES, len(params))):
            del params[name]
        return Suggestion(params, "sampler, near the best")

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=self.STARTUP_TRIALS, constant_liar=True)


class StaircaseStrategy(Strategy):
    """What practitioners climb by hand: memory, then sequences, then the token budget.

    One change at a time, kept while it improves; where the first step up does not, the steps down are tried.
    """

    ORDER = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    STEP = 2
    """Rungs of a ladder that are taken at once: ladders of counts have two an octave."""
    exhausted = "the staircase is climbed: no single step improves"

    def propose(self, history: History) -> Suggestion | None:
        """Climbs anew from the baseline through what was told, up to the first step that was not tried."""
        space = history.space
        here = history.baseline
        if here is None:
            return None
        params = space.params(here.config)
        for axis in (a for name in self.ORDER for a in space.axes if a.name == name and a.ordered):
            for step in (self.STEP, -self.STEP):
                improved = False
                while (to := _index(params[axis.name]) + step) in range(len(axis.values)):
                    ahead = {**params, axis.name: to}
                    config = space.config(ahead)
                    if space.refusals(config):
                        break
                    told = history.of(config)
                    if told is None and config_key(config) in history.taken:
                        break  # another worker is on this step
                    if told is None:
                        return Suggestion(ahead, f"staircase: {axis.name} to {axis.values[to]}")
                    if not improves(told, here, history.objective):
                        break
                    params, here, improved = ahead, told, True
                if improved:
                    break
        return None


def by_measurement(history: History) -> list[TrialResult]:
    """Feasible configs, the best first.

    Those that keep a distance that counts to every bound come first (see ``floor_of``), for one measurement
    does not tell a bound that is just held from one that is just missed. Then the objective decides, and of
    those that tie with the best the one with fewest changes; the user's own is the best unless another one is
    better.
    """
    objective, space = history.objective, history.space
    feasible = [r for r in merge_repeats(history.results) if r.feasible and math.isfinite(r.value(objective))]
    own = [r for r in feasible if not space.changes(r.config)][:1]
    others = [r for r in feasible if space.changes(r.config)]
    ordered = sorted(others, key=lambda r: (not _keeps_distance(r), _cost(r, objective)))
    if ordered:
        top = ordered[0]
        near = [r for r in ordered if _keeps_distance(r) >= _keeps_distance(top) and _tied(r, top, objective)]
        first = min(near, key=lambda r: (len(space.changes(r.config)), ordered.index(r)))
        ordered = [first, *(r for r in ordered if r is not first)]
    better = 1 if ordered and own and _cost(ordered[0], objective) < _cost(own[0], objective) else 0
    return [*ordered[:better], *own, *ordered[better:]]


def _keeps_distance(result: TrialResult) -> bool:
    """Whether every bound but those of counts is held by a change that counts."""
    distances = {name: -v for name, v in result.violations.items() if name not in (SERVES, *COUNTS)}
    return all(distance >= floor_of(name) for name, distance in distances.items())


def _cost(result: TrialResult, objective: Objective) -> float:
    """Smaller is better."""
    value = result.value(objective)
    return value if objective.direction == "minimize" else -value


def _tied(a: TrialResult, b: TrialResult, objective: Objective) -> bool:
    x, y = _cost(a, objective), _cost(b, objective)
    return x == y or abs(x - y) <= TIE_SHARE * abs(y)


def _index(param: Value) -> int:
    assert isinstance(param, int), "the parameter of an ordered axis is the index of a rung"
    return param


def improves(new: TrialResult, old: TrialResult, objective: Objective) -> bool:
    """Feasible before infeasible, then the objective; among infeasible ones the smaller violations."""
    if new.feasible != old.feasible:
        return new.feasible
    if new.feasible:
        return objective.better(new.value(objective), old.value(objective))
    return new.excess < old.excess
