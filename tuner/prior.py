"""What a simulation expects of configs before they are measured.

A prior may be wrong by half, or speak of another card: whoever uses it corrects it by what is measured
(``gp.py``). It is asked for single configs, for each costs a simulated run; in between it is interpolated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.target import Target, TargetFailed
from tuner.load import Load, span
from tuner.measure import Run, measure
from tuner.slo import Slo
from tuner.space import Config, config_key


@dataclass(frozen=True)
class Prediction:
    """``values``: by the metric's name, as in a Measurement. ``failure``: why no server would come up."""

    config: Config
    values: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


class Prior(ABC):
    """Predictions, each made once."""

    source = ""
    """Where they come from, for people."""

    def __init__(self) -> None:
        self.known: dict[str, Prediction] = {}
        """By config_key; in the order in which they were made."""

    def ask(self, configs: Iterable[Config]) -> int:
        """Predict those that are not known yet; returns how many that were."""
        fresh = {key: config for config in configs if (key := config_key(config)) not in self.known}
        self.known |= {key: self.predict(config) for key, config in fresh.items()}
        return len(fresh)

    @abstractmethod
    def predict(self, config: Config) -> Prediction:
        """Must return the same for the same config."""


class SimulatedPrior(Prior):
    """Runs every config in virtual time on ``target``, under the load of the trials."""

    def __init__(
        self, target: Target, load: Load, slo: Slo, flags: Callable[[Config], Mapping[str, Any]]
    ) -> None:
        """``flags``: what a server of a config is started with."""
        super().__init__()
        self.source = f"{target.name}: {target.estimate}"
        self._target, self._slo, self._flags = target, slo, flags
        self._schedules = load.rungs()

    def predict(self, config: Config) -> Prediction:
        try:
            with self._target.open(self._flags(config)) as server:
                runs = [Run(server.run(schedule), span(schedule)) for schedule in self._schedules]
        except TargetFailed as failure:
            return Prediction(config, failure=f"{failure.reason}: {failure.detail}")
        readings = measure(runs, self._slo).readings
        return Prediction(config, {name: reading.value for name, reading in readings.items()})
