"""A confirmation in virtual time: which configs a simulation expects to come through it.

Every trial of a study has the same requests at the same times, so that trials differ by their configs alone.
What they say of a tail or a bound is then true of that load, and the config that just holds a bound there
misses it on others as often as not. A simulation costs no launch: it runs configs and the baseline under
loads that nobody has had.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from enum import IntEnum

from servers.slo.bounds import name_of
from servers.slo.objective import Slo
from tuner.runs.load import Traffic
from tuner.runs.measure import Run
from tuner.search.prior import Prediction, SimulatedPrior
from tuner.space.config import Config, config_key
from tuner.study.confirmation import judge_runs

MOST = 24
"""Configs that are presimulated at once."""
ALIKE = 0.02
"""Objectives that differ by less (in logarithm) are the same."""
CHANGE = 0.05
"""What every change must gain (in logarithm)."""
PAIRS, FIRST = 6, 64
"""Pairs of simulated runs, and the first seed's place: behind those of any confirmation."""


class Forecast(IntEnum):
    SURE = 0
    """Every bound is held by the whole of its interval."""
    LIKELY = 1
    """It would be confirmed."""
    REFUSED = 2


class Presimulation:
    """Of configs against ``baseline``; each is simulated once."""

    def __init__(self, prior: SimulatedPrior, load: Traffic, slo: Slo, baseline: Config) -> None:
        seeds = load.confirmation_seeds(FIRST + PAIRS)[FIRST:]
        self._schedules = [load.confirmation(seed) for seed in seeds]
        self._prior, self._slo, self._baseline = prior, slo, baseline
        self._own = self._runs(baseline)
        self._forecasts: dict[str, Forecast] = {}

    def forecast(self, config: Config) -> Forecast:
        key = config_key(config)
        if key not in self._forecasts:
            self._forecasts[key] = self._judged(self._runs(config))
        return self._forecasts[key]

    def known(self, config: Config) -> Forecast | None:
        """What was found already."""
        return self._forecasts.get(config_key(config))

    def best(self) -> Config | None:
        """Of what the prior knows, the sure config with the best objective; a change must be worth it."""
        objective, known = self._slo.objective, self._prior.known
        own = known.get(config_key(self._baseline))
        if own is None:
            return None
        bounds = self._slo.resolve(lambda metric, cls: own.values.get(name_of(metric, cls), math.nan))

        def promising(found: Prediction) -> bool:
            if found.failure or found.config == self._baseline:
                return False
            held = all(b.violation(found.values[b.name]) <= 0 for b in bounds if b.name in found.values)
            return held and 0 < found.values[objective.name] < math.inf

        def cost(found: Prediction) -> float:
            """In logarithm, of which every change takes its part."""
            value = math.log(found.values[objective.name])
            changes = sum(found.config[flag] != own for flag, own in self._baseline.items())
            return (value if objective.direction == "minimize" else -value) + CHANGE * changes

        # Knobs without effect make many configs of the same figures: the simplest stands for them.
        alike: dict[int, Config] = {}
        for found in sorted(filter(promising, known.values()), key=cost):
            alike.setdefault(round(math.log(found.values[objective.name]) / ALIKE), found.config)
        tried = itertools.islice(alike.values(), MOST)
        return next((config for config in tried if self.forecast(config) is Forecast.SURE), None)

    def _runs(self, config: Config) -> list[Run]:
        return self._prior.runs(config, self._schedules)

    def _judged(self, runs: list[Run]) -> Forecast:
        if not runs or not self._own:
            return Forecast.REFUSED
        expected = judge_runs(self._own, runs, self._slo, trial=0, baseline_feasible=True)
        if not expected.confirmed:
            return Forecast.REFUSED
        return Forecast.SURE if expected.surely_holds(self._slo.relative) else Forecast.LIKELY


def describe_forecasts(forecasts: Mapping[int, Forecast]) -> str:
    """How trials, by their numbers, fared in a presimulation."""
    words = {Forecast.SURE: "sure to hold", Forecast.LIKELY: "likely to hold", Forecast.REFUSED: "refused"}
    fared = {
        forecast: [str(number) for number, own in forecasts.items() if own is forecast]
        for forecast in sorted(Forecast)
    }
    said = [
        f"{words[forecast]}: trial {', '.join(numbers)}" for forecast, numbers in fared.items() if numbers
    ]
    return f"simulated on fresh requests; {'; '.join(said)}"
