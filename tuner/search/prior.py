"""What a simulation expects of configs before they are measured.

A prior may be wrong by half, or speak of another card: the search corrects it by what is measured
(``gp.py``). It is asked for single configs, for each costs a simulated run; in between it is interpolated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadgen.plan.workload import Schedule
from loadgen.target import Target, TargetFailed
from loadgen.targets.simulated import HERE, PREFIX, SimulatedTarget, SimulatedTargetError
from servers.errors import UserError
from servers.slo.objective import Slo
from tuner.runs.load import Traffic, load_seconds
from tuner.runs.measure import Run, measure
from tuner.space.space import Config, config_key


@dataclass(frozen=True)
class Prediction:
    """``values``: by the metric's name, as in a Measurement. ``failure``: why no server would come up."""

    config: Config
    values: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


class PriorError(UserError):
    """``--prior`` names something that cannot be simulated."""


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
        self, target: Target, load: Traffic, slo: Slo, flags: Callable[[Config], Mapping[str, Any]]
    ) -> None:
        """``flags``: what a server of a config is started with."""
        super().__init__()
        self.source = f"{target.name}: {target.estimate}"
        self._target, self._slo, self._flags = target, slo, flags
        self._schedules = load.rungs()

    def predict(self, config: Config) -> Prediction:
        try:
            runs = self._simulated(config, self._schedules)
        except TargetFailed as failure:
            return Prediction(config, failure=f"{failure.reason}: {failure.detail}")
        readings = measure(runs, self._slo).readings
        return Prediction(config, {name: reading.value for name, reading in readings.items()})

    def _simulated(self, config: Config, schedules: Iterable[Schedule]) -> list[Run]:
        """Raises TargetFailed."""
        with self._target.open(self._flags(config)) as server:
            return [Run(server.run(schedule), load_seconds(schedule)) for schedule in schedules]


AUTO, NONE, FITTED = "auto", "none", "sketch"
DRAFT_ACCEPTANCE = 0.1
"""Of drafts, until it is measured: generated prompts repeat little, and a prior that promises
much of drafts spends launches on them."""


def make_simulator(
    name: str,
    target: str,
    model: str,
    note: Callable[[str], None] = lambda text: None,
    fitted: Callable[[], Target | None] = lambda: None,
) -> Callable[[], Target | None]:
    """What makes the simulator that ``--prior`` names: AUTO, NONE, FITTED, ``simulated:h100``, a file of step
    times.

    AUTO is a simulator fitted to what the baseline measured (``fitted_simulator.py``) for servers that are
    started; none for those that run already, and for a simulation, which costs no more than its fit. A
    simulator is made when it is called, with no server running; what is missing for it is noted, and there is
    no prior. Raises PriorError.
    """
    if name == AUTO:
        name = NONE if target.startswith((PREFIX, "http://", "https://")) else FITTED
    if name == NONE:
        return lambda: None
    if name == FITTED:
        return fitted
    if not name.startswith(PREFIX) and not name.endswith(".json"):
        raise PriorError(
            f"--prior {name}: unknown. Give {AUTO}, {NONE}, {FITTED}, {PREFIX}h100 or another device (see "
            "vtune simulate), or a JSON file of step times."
        )
    if name == PREFIX + HERE:
        return lambda: _own(model, note)
    try:
        made = SimulatedTarget(PREFIX + name.removeprefix(PREFIX), model, acceptance=DRAFT_ACCEPTANCE)
    except SimulatedTargetError as error:
        raise PriorError(f"--prior {name}: {error}") from None
    return lambda: made


def _own(model: str, note: Callable[[str], None]) -> Target | None:
    try:
        return SimulatedTarget(PREFIX + HERE, model, acceptance=DRAFT_ACCEPTANCE, calibrating=note)
    except (SimulatedTargetError, ImportError) as error:
        note(f"no prior: {error}")
        return None
