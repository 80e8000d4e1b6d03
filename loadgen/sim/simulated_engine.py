"""The bundled engine, simulated: all that loadgen knows of ``engine.sim``, behind its facade.

Importing it loads the engine, so that commands do so when they simulate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.sim.facade import (
    DEVICES,
    SIMULATED_FLAGS,
    WITHOUT_EFFECT,
    ConfigError,
    EngineUserError,
    ModelConfig,
    SamplingParams,
    SimulatedServer,
    Simulation,
    StepSample,
    StepTimes,
    StepTimesError,
    TimedRequest,
    cache_dir,
    draw_value,
    fit_step_times,
    group_samples,
    on_device,
    on_pool,
    on_times,
    read_model_config,
    read_step_log,
    work_ratios,
)
from loadgen.plan.workload import PlannedRequest
from loadgen.sim.target_name import HERE, PREFIX, SimulatedTargetError
from loadgen.sim.virtual_client import START_UNIX_MS
from loadgen.sim.virtual_server import Answers, StepAnswer
from loadgen.target import StartFailed

__all__ = [
    "EngineServer",
    "EngineUserError",
    "Simulation",
    "Simulator",
    "StepSample",
    "StepTimes",
    "cache_dir",
    "default_flags",
    "fit_step_times",
    "fitted_simulator",
    "group_samples",
    "heeded_flags",
    "read_model",
    "read_step_log",
    "simulator",
    "start_servers",
    "work_ratios",
]

Simulator = Callable[[Mapping[str, Any]], Simulation]
"""Says what a config (a server's flags) is simulated with. Raises SimulatedTargetError."""


def default_flags(device: str) -> Mapping[str, int]:
    """The flags whose defaults depend on the device, if it is a GPU that is known."""
    return DEVICES[device].batch_defaults if device in DEVICES else {}


def heeded_flags() -> list[str]:
    """Those that a simulation heeds."""
    return sorted(SIMULATED_FLAGS - WITHOUT_EFFECT)


def read_model(name: str) -> ModelConfig:
    """Raises SimulatedTargetError."""
    try:
        return read_model_config(name)
    except (EngineUserError, OSError) as error:
        raise SimulatedTargetError(f"--model {name}: {error}") from None


def simulator(
    device: str, model: ModelConfig, acceptance: float | None, measured: Callable[[], StepTimes]
) -> Simulator:
    """Of a device by its data sheet, of step times that were saved, or of those ``measured`` on this machine.

    Raises SimulatedTargetError for another device.
    """
    if device in DEVICES:
        return _checked(lambda flags: on_device(model, DEVICES[device], flags, acceptance))
    if device == HERE:
        times = measured()
    elif device.endswith(".json"):
        try:
            times = StepTimes.from_json(Path(device).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, StepTimesError) as error:
            raise SimulatedTargetError(f"{PREFIX}{device}: no step times: {error}") from None
    else:
        raise SimulatedTargetError(
            f"{PREFIX}{device}: unknown. Known are {', '.join(DEVICES)}, {HERE} (this machine), and a JSON "
            "file of step times"
        )
    return _checked(lambda flags: on_times(model, times, flags, acceptance))


def fitted_simulator(
    coefficients: Mapping[str, Any],
    max_model_len: int,
    flags: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> Simulator:
    """Of a server of which only its step times are known, by the names of StepTimes.

    ``flags``: of a config those that are simulated, with the size of the pool as
    ``num_gpu_blocks_override``.
    """
    times = StepTimes(**coefficients)
    return _checked(lambda config: on_pool(times, max_model_len, flags(config)))


def _checked(simulate: Simulator) -> Simulator:
    def checked(flags: Mapping[str, Any]) -> Simulation:
        try:
            return simulate(flags)
        except TypeError as error:  # a word where a number belongs
            raise SimulatedTargetError(f"a flag has a value of the wrong kind: {error}") from None
        except EngineUserError as error:
            raise SimulatedTargetError(str(error)) from None

    return checked


def start_servers(simulation: Simulation, name: str, numbers: Sequence[int]) -> list[EngineServer]:
    """One of each number. Raises StartFailed: out_of_memory or kv_cache_too_small."""
    room = simulation.device_bytes * simulation.config.gpu_memory_utilization
    taken = simulation.size.weights_bytes + simulation.size.activation_bytes
    if taken > room:
        raise StartFailed(
            "out_of_memory",
            f"weights and activations take {taken / 1e9:.1f} GB, gpu_memory_utilization leaves "
            f"{room / 1e9:.1f} GB",
        )
    try:
        return [EngineServer(SimulatedServer(simulation, name, number), number) for number in numbers]
    except ConfigError as error:
        raise StartFailed("kv_cache_too_small", str(error)) from None


class EngineServer:
    """A simulated engine as the virtual client sees a server. ``number``: what it draws."""

    def __init__(self, engine: SimulatedServer, number: int) -> None:
        self.engine = engine
        self._chance, self._arrived = random.Random(number), 0.0
        self._outputs = 0
        """Of the last step."""

    @property
    def now(self) -> float:
        return self.engine.now

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def entry(self, prompt_tokens: int) -> float:
        return self.engine.times.entry_seconds(prompt_tokens)

    def arrival(self, end: float) -> float:
        if not (delivery := self.engine.times.delivery):
            return end
        late = draw_value(delivery, self._outputs, self._chance) or 0.0
        self._arrived = max(self._arrived, end + late)
        return self._arrived

    def submit(self, request_id: str, token_ids: Sequence[int], planned: PlannedRequest, at: float) -> None:
        room = self.engine.max_model_len
        if len(token_ids) + planned.max_tokens > room:
            raise ValueError(
                f"the model's context is {room} tokens, and {len(token_ids)} of the prompt with "
                f"{planned.max_tokens} of the answer exceed it"
            )
        sampling = SamplingParams(planned.max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(TimedRequest(request_id, at, token_ids, sampling, planned.priority))

    def step(self) -> Answers:
        delivery = self.engine.step()
        outputs, others = delivery.outputs, {}
        self._outputs = len(outputs) + delivery.num_fast_decodes
        for row, output in outputs.others.items():
            ended = self.engine.finished.pop(output.request_id, None)
            others[row] = StepAnswer(
                len(output.token_ids),
                output.finish.value if output.finish else None,
                ended.cached_tokens if ended else None,
                ended.queue if ended else None,
                ended.prefill if ended else None,
            )
        return Answers(outputs.request_ids, others, delivery.joined, delivery.left)

    def stream(self, before: float) -> list[float]:
        ends = self.engine.run_fast_decodes(before)
        if ends:
            self._outputs = self.engine.core.scheduler.num_running
        return ends

    def abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def idle_until(self, moment: float) -> None:
        self.engine.idle_until(moment)

    def scrapes_since(self, start: float) -> tuple[tuple[int, str], ...]:
        """(unix ms, text): the last one before ``start``, those of every second since, and one of now."""
        whole = [*self.engine.scrapes, (self.now, self.engine.scrape())]
        first = max((n for n, (at, _) in enumerate(whole) if at <= start), default=0)
        return tuple((START_UNIX_MS + round(at * 1e3), text) for at, text in whole[first:])
