"""The engine in this process, without HTTP, in virtual time on some device."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.plan.workload import Schedule
from loadgen.sim.target_name import HERE, PREFIX, SimulatedTargetError
from loadgen.target import OpenTarget, StartFailed, Target
from servers.flags.offered_flags import OfferedFlags
from servers.flags.words import render

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from loadgen.plan.load_policy import Progress
    from loadgen.sim.routing import Policy
    from loadgen.sim.simulated_engine import EngineServer, Simulation, Simulator


def gpu_defaults(target: str) -> Mapping[str, int]:
    """Of ``simulated:h100`` and other GPUs, the flags whose defaults depend on the device; {} for others."""
    if not target.startswith(PREFIX):
        return {}
    from loadgen.sim.simulated_engine import default_flags

    return default_flags(target.removeprefix(PREFIX))


class SimulatedTarget(Target):
    """Servers in virtual time: ``simulated:h100`` and other devices by their data sheets, ``simulated:FILE``
    by step times that were saved, ``simulated:bundled`` by those of this machine.

    ``model`` is a config.json, a checkpoint or "bundled". With ``replicas`` a config is a fleet. Runs are the
    same whenever and wherever they are run; ``seed`` is of what they draw, where step times were measured or
    drafts are accepted by chance. With ``simulate``, which says what a config is simulated with, ``name`` and
    ``model`` are names only. Raises SimulatedTargetError for a target or a model that cannot be read.
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
        simulate: Simulator | None = None,
    ) -> None:
        self.name = name
        self._numbers = range(seed * replicas, (seed + 1) * replicas)
        self.replicas, self.routing = replicas, routing
        self._model_name = model
        self._seconds = 0.0
        self._simulate = simulate or _simulator(name.removeprefix(PREFIX), model, acceptance, calibrating)
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
        return self._simulate(config)

    def offered_flags(self) -> OfferedFlags:
        """What a simulation heeds."""
        from loadgen.sim.simulated_engine import heeded_flags

        return OfferedFlags(self.name, None, dict.fromkeys(heeded_flags(), ()))

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenSimulation]:
        """Raises StartFailed: bad_flag, out_of_memory or kv_cache_too_small."""
        from loadgen.sim.simulated_engine import start_servers

        try:
            simulation = self.simulation(config)
        except SimulatedTargetError as error:
            raise StartFailed("bad_flag", str(error)) from None
        yield OpenSimulation(self, simulation, start_servers(simulation, self.served_name, self._numbers))

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
    from loadgen.sim.simulated_engine import fitted_simulator

    return SimulatedTarget(name, name, simulate=fitted_simulator(coefficients, max_model_len, flags))


class OpenSimulation(OpenTarget):
    """Simulated servers that are up: one, or a fleet behind its router."""

    def __init__(
        self, target: SimulatedTarget, simulation: Simulation, servers: Sequence[EngineServer]
    ) -> None:
        self.model, self.simulation = target.served_name, simulation
        self.max_model_len = servers[0].engine.max_model_len
        self.parts: tuple[Records, ...] = ()
        """What each replica of a fleet served in the last run."""
        self.servers = servers
        self._target, self._runs = target, 0

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

        began = max(server.now for server in self.servers)
        name = f"{self._runs}-"
        self._runs += 1
        failures = warm_up(schedule, self.servers, name)
        route = make_route(self._target.routing, len(self.servers), schedule)
        client = VirtualClient(
            schedule,
            self.servers,
            route,
            name=name,
            timeout=timeout,
            drain=drain,
            progress=progress,
            stop=stop,
        )
        client.run()
        self._target.passed(max(server.now for server in self.servers) - began)
        environment = {
            "url": f"{self._target.name} ({self.simulation.times.source})",
            "model": self.model,
            "estimate": "; ".join(self.simulation.assumed),
        }
        scrapes = [server.scrapes_since(client.start) for server in self.servers]
        self.parts = tuple(
            records_of(client, schedule, environment=environment, scrapes=scrapes[number], server=number)
            for number in range(len(self.servers) if len(self.servers) > 1 else 0)
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
        return self.servers[0].engine.scrape()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.servers[0].engine.core.memory_plan.describe().splitlines()[-lines:])


def _simulator(
    device: str, model: str, acceptance: float | None, calibrating: Callable[[str], None] | None
) -> Simulator:
    from loadgen.sim.simulated_engine import StepTimes, read_model, simulator

    def measured() -> StepTimes:
        from loadgen.targets.measured_steps import measured_step_times

        return measured_step_times(calibrating)

    return simulator(device, read_model(model), acceptance, measured)


def _served_name(model: str) -> str:
    """What the config says it is called, for a launch command; else the path or id."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        return model
    name = json.loads(file.read_text(encoding="utf-8")).get("_name_or_path")
    return name if isinstance(name, str) and name else str(file.parent)
