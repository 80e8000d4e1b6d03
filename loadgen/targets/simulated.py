"""The engine in this process, without HTTP, in virtual time on some device."""

from __future__ import annotations

import json
import platform
import random
import shlex
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.plan.workload import PlannedRequest, Schedule
from loadgen.target import OpenTarget, StartFailed, Target, TargetFailed
from servers.errors import UserError
from servers.flags.offered_flags import OfferedFlags
from servers.flags.words import render

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig
    from engine.sim.server import SimulatedServer, Simulation
    from engine.sim.step_times import StepSample, StepTimes
    from loadgen.measure.record import Records
    from loadgen.plan.load_policy import Progress
    from loadgen.sim.routing import Policy
    from loadgen.sim.virtual_server import Answers

PREFIX = "simulated:"
HERE = "bundled"
"""``simulated:bundled``: this machine and the bundled model, as measured on it."""


def gpu_defaults(target: str) -> Mapping[str, int]:
    """Of ``simulated:h100`` and other GPUs, the flags whose defaults depend on the device; {} for others."""
    from engine.sim.devices import DEVICES
    from engine.sim.server import gpu_defaults as defaults

    device = DEVICES.get(target.removeprefix(PREFIX)) if target.startswith(PREFIX) else None
    return defaults(device) if device else {}


class SimulatedTargetError(UserError):
    """A device, a model, step times or flags that cannot be simulated."""


class SimulatedTarget(Target):
    """Servers in virtual time: ``simulated:h100`` and other devices by their data sheets, ``simulated:FILE``
    by step times that were saved, ``simulated:bundled`` by those of this machine.

    ``model`` is a config.json, a checkpoint or "bundled". With ``replicas`` a config is a fleet. Runs are the
    same whenever and wherever they are run; ``seed`` is of what they draw, where step times were measured or
    drafts are accepted by chance. With ``simulate``, which says what a config is simulated with, ``name`` and
    ``model`` are names only. Raises ValueError for a target or a model that cannot be read.
    """

    def __init__(
        self,
        name: str,
        model: str,
        *,
        replicas: int = 1,
        routing: Policy = "least-loaded",
        acceptance: float | None = None,
        calibrating: Callable[[str], None] | None = None,
        seed: int = 0,
        simulate: Callable[[Mapping[str, Any]], Simulation] | None = None,
    ) -> None:
        self.name = name
        self._numbers = range(seed * replicas, (seed + 1) * replicas)
        self.replicas, self.routing = replicas, routing
        self._model_name = model
        self._seconds = 0.0
        self._make = simulate or _maker(name.removeprefix(PREFIX), read_model(model), acceptance, calibrating)
        plain = self.simulation({})
        self.estimate = "; ".join((plain.times.source, *plain.assumed))
        self.served_name = _served_name(model)

    def clock(self) -> float:
        """Virtual seconds of all runs."""
        return self._seconds

    def passed(self, seconds: float) -> None:
        self._seconds += seconds

    def simulation(self, config: Mapping[str, Any]) -> Simulation:
        """What a config is simulated with. Raises SimulatedTargetError for a wrong flag."""
        from engine.errors import EngineUserError

        try:
            return self._make(config)
        except TypeError as error:  # a word where a number belongs
            raise SimulatedTargetError(f"a flag has a value of the wrong kind: {error}") from None
        except EngineUserError as error:
            raise SimulatedTargetError(str(error)) from None

    def offered_flags(self) -> OfferedFlags:
        """What a simulation heeds."""
        from engine.sim.server import SIMULATED_FLAGS, WITHOUT_EFFECT

        return OfferedFlags(self.name, None, dict.fromkeys(sorted(SIMULATED_FLAGS - WITHOUT_EFFECT), ()))

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenSimulation]:
        """Raises StartFailed: bad_flag, out_of_memory or kv_cache_too_small."""
        from engine.errors import ConfigError
        from engine.sim.server import SimulatedServer

        try:
            simulation = self.simulation(config)
        except SimulatedTargetError as error:
            raise StartFailed("bad_flag", str(error)) from None
        room = _device_bytes(simulation) * simulation.config.gpu_memory_utilization
        taken = simulation.size.weights_bytes + simulation.size.activation_bytes
        if taken > room:
            raise StartFailed(
                "out_of_memory",
                f"weights and activations take {taken / 1e9:.1f} GB, gpu_memory_utilization leaves "
                f"{room / 1e9:.1f} GB",
            )
        try:
            servers = [SimulatedServer(simulation, self.served_name, n) for n in self._numbers]
        except ConfigError as error:
            raise StartFailed("kv_cache_too_small", str(error)) from None
        yield OpenSimulation(
            self, simulation, [_Door(*pair) for pair in zip(servers, self._numbers, strict=True)]
        )

    def launch_command(self, config: Mapping[str, Any]) -> str:
        program = "vtune" if self._model_name == HERE else "vllm"
        return shlex.join([program, "serve", self.served_name, *render(config)])


def fitted_target(
    name: str,
    coefficients: Mapping[str, Any],
    max_model_len: int,
    flags: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> SimulatedTarget:
    """A server that is known from outside alone: what its steps take, by the names of StepTimes.

    ``flags``: of a config those that are simulated, with the size of the pool as
    ``num_gpu_blocks_override``.
    """
    from engine.sim.server import on_pool
    from engine.sim.step_times import StepTimes

    times = StepTimes(**coefficients)
    return SimulatedTarget(name, name, simulate=lambda config: on_pool(times, max_model_len, flags(config)))


class OpenSimulation(OpenTarget):
    """Simulated servers that are up: one, or a fleet behind its router."""

    def __init__(self, target: SimulatedTarget, simulation: Simulation, doors: Sequence[_Door]) -> None:
        self.model, self.simulation = target.served_name, simulation
        self.max_model_len = doors[0].server.max_model_len
        self.parts: tuple[Records, ...] = ()
        """What each replica of a fleet served in the last run."""
        self._target, self._doors, self._runs = target, doors, 0

    def run(
        self,
        schedule: Schedule,
        progress: Callable[[Progress], None] | None = None,
        stop: threading.Event | None = None,
        *,
        timeout: float = 600.0,
        drain: float | None = None,
    ) -> Records:
        from loadgen.sim.routing import make_route
        from loadgen.sim.virtual_client import VirtualClient, records_of, warm_up

        began = max(door.now for door in self._doors)
        name = f"{self._runs}-"
        self._runs += 1
        failures = warm_up(schedule, self._doors, name)
        route = make_route(self._target.routing, len(self._doors), schedule)
        client = VirtualClient(
            schedule,
            self._doors,
            route,
            name=name,
            timeout=timeout,
            drain=drain,
            progress=progress,
            stop=stop,
        )
        client.run()
        self._target.passed(max(door.now for door in self._doors) - began)
        environment = {
            "url": f"{self._target.name} ({self.simulation.times.source})",
            "model": self.model,
            "estimate": "; ".join(self.simulation.assumed),
        }
        scrapes = [door.scrapes_since(client.start) for door in self._doors]
        self.parts = tuple(
            records_of(client, schedule, environment=environment, scrapes=scrapes[number], server=number)
            for number in range(len(self._doors) if len(self._doors) > 1 else 0)
        )
        return records_of(
            client,
            schedule,
            environment=environment,
            warmup_failures=failures,
            scrapes=scrapes[0] if len(scrapes) == 1 else (),
        )

    def scrape(self) -> str:
        """Of the first replica."""
        return self._doors[0].server.scrape()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self._doors[0].server.core.memory_plan.describe().splitlines()[-lines:])


class _Door:
    """A simulated engine as the client sees a server."""

    def __init__(self, server: SimulatedServer, number: int) -> None:
        self.server = server
        self._chance, self._arrived = random.Random(number), 0.0
        self._outputs = 0
        """Of the last step."""

    @property
    def now(self) -> float:
        return self.server.now

    @property
    def busy(self) -> bool:
        return self.server.busy

    def entry(self, prompt_tokens: int) -> float:
        return self.server.times.entry_seconds(prompt_tokens)

    def arrival(self, end: float) -> float:
        if not (delivery := self.server.times.delivery):
            return end
        from engine.sim.step_times import draw_value

        late = draw_value(delivery, self._outputs, self._chance) or 0.0
        self._arrived = max(self._arrived, end + late)
        return self._arrived

    def submit(self, request_id: str, token_ids: Sequence[int], planned: PlannedRequest, at: float) -> None:
        from engine.request import SamplingParams
        from engine.sim.simulated_runner import TimedRequest

        room = self.server.max_model_len
        if len(token_ids) + planned.max_tokens > room:
            raise ValueError(
                f"the model's context is {room} tokens, and {len(token_ids)} of the prompt with "
                f"{planned.max_tokens} of the answer exceed it"
            )
        sampling = SamplingParams(planned.max_tokens, temperature=0.0, ignore_eos=True)
        self.server.add(TimedRequest(request_id, at, token_ids, sampling, planned.priority))

    def step(self) -> Answers:
        from loadgen.sim.virtual_server import Answers, StepAnswer

        delivery = self.server.step()
        outputs, others = delivery.outputs, {}
        self._outputs = len(outputs) + delivery.num_fast_decodes
        for row, output in outputs.others.items():
            ended = self.server.finished.pop(output.request_id, None)
            others[row] = StepAnswer(
                len(output.token_ids),
                output.finish.value if output.finish else None,
                ended.cached_tokens if ended else None,
                ended.queue if ended else None,
                ended.prefill if ended else None,
            )
        return Answers(outputs.request_ids, others, delivery.joined, delivery.left)

    def stream(self, before: float) -> list[float]:
        ends = self.server.run_fast_decodes(before)
        if ends:
            self._outputs = self.server.core.scheduler.num_running
        return ends

    def abort(self, request_id: str) -> None:
        self.server.abort(request_id)

    def idle_until(self, moment: float) -> None:
        self.server.idle_until(moment)

    def scrapes_since(self, start: float) -> tuple[tuple[int, str], ...]:
        """(unix ms, text): the last one before ``start``, those of every second since, and one of now."""
        from loadgen.sim.virtual_client import START_UNIX_MS

        whole = [*self.server.scrapes, (self.now, self.server.scrape())]
        first = max((n for n, (at, _) in enumerate(whole) if at <= start), default=0)
        return tuple((START_UNIX_MS + round(at * 1e3), text) for at, text in whole[first:])


def read_model(name: str) -> ModelConfig:
    """Raises SimulatedTargetError."""
    from engine.errors import EngineUserError
    from engine.models.checkpoint import load_model_config
    from engine.models.weights import resolve_model

    try:
        path = resolve_model(name)
        return load_model_config(path, "gguf" if path.suffix == ".gguf" else "dummy")  # no weights needed
    except (EngineUserError, OSError) as error:
        raise SimulatedTargetError(f"--model {name}: {error}") from None


def _served_name(model: str) -> str:
    """What the config says it is called, for a launch command; else the path or id."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return model
    name = json.loads(file.read_text(encoding="utf-8")).get("_name_or_path")
    return name if isinstance(name, str) and name else str(file.parent)


def _maker(
    device: str,
    model: ModelConfig,
    acceptance: float | None,
    calibrating: Callable[[str], None] | None,
) -> Callable[[Mapping[str, Any]], Simulation]:
    from engine.sim.devices import DEVICES
    from engine.sim.server import on_device, on_times
    from engine.sim.step_times import StepTimes, StepTimesError

    if device in DEVICES:
        return lambda flags: on_device(model, DEVICES[device], flags, acceptance)
    if device == HERE:
        times = _measured(calibrating)
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
    return lambda flags: on_times(model, times, flags, acceptance)


def _measured(calibrating: Callable[[str], None] | None) -> StepTimes:
    """The bundled model's step times on this machine: from the cache, or measured and put there."""
    from engine.cache import cache_dir
    from engine.sim.step_times import StepTimes
    from servers.files import write_atomically

    saved = cache_dir() / f"step-times-{platform.node()}.json"
    if saved.is_file():
        return StepTimes.from_json(saved.read_text(encoding="utf-8"))
    if calibrating:
        calibrating(f"measuring the bundled model's steps on this machine, kept in {saved}")
    times = fit_steps(*measure_steps())
    write_atomically(saved, [times.to_json(), "\n"])
    return times


def measure_steps() -> tuple[list[StepSample], list[Records]]:
    """The steps of the bundled model's server on this machine, by its step log under a load of all kinds, and
    what its client saw of them.

    The processes that share the cores with it are in them. Some 45 s; leave the machine alone.

    Raises SimulatedTargetError where the ``engine`` extra is missing, or the server fails.
    """
    from engine.sim.step_log import read_step_log
    from loadgen.sim import calibration
    from loadgen.targets.server import ServerTarget

    with tempfile.TemporaryDirectory(prefix="vtune-steps-") as folder:
        log = Path(folder) / "steps"
        target = ServerTarget.bundled(env={"VTUNE_STEP_LOG": str(log)})
        try:
            with target.open(calibration.FLAGS) as server:
                waves = calibration.run(server, read_model(HERE).vocab_size)
                next(waves)
                cold = len(read_step_log(log.read_text(encoding="utf-8")))
                runs = list(waves)
        except TargetFailed as failure:
            raise SimulatedTargetError(
                f"{PREFIX}{HERE} measures the bundled engine once, and that failed: {failure.detail}"
            ) from None
        samples = read_step_log(log.read_text(encoding="utf-8"))[cold:]
    return samples, runs


def fit_steps(samples: Sequence[StepSample], runs: Sequence[Records]) -> StepTimes:
    """The step times that explain what was measured."""
    from engine.sim.step_times import fit_step_times, group_samples
    from loadgen.sim import calibration

    entry, entry_per_token = calibration.entry(runs)
    late = calibration.delivery(runs, [(sample.load.rows, sample.ended) for sample in samples])
    times = fit_step_times(samples, f"{len(samples)} steps of the bundled server on this machine")
    return replace(times, entry=entry, entry_per_token=entry_per_token, delivery=group_samples(late))


def _device_bytes(simulation: Simulation) -> int:
    """As the memory plan takes them."""
    from engine.config import GIB

    return simulation.config.device_memory or max(GIB, 2 * simulation.size.weights_bytes)
