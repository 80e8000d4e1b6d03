"""Where experiments run: the bundled engine on this machine, or a simulated device with its replicas."""

from __future__ import annotations

import re
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from doctor.diagnosis.experiment import BUNDLED_MODEL, SIMULATED, Experiment, ExperimentError, ExperimentSide
from loadgen.target import OpenTarget, Target
from loadgen.targets.server import ServerTarget
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError, gpu_defaults

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from loadgen.plan.workload import Schedule
    from loadgen.sim.routing import Policy

BUNDLED_SHAPE = "135m"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{)?", re.MULTILINE)


class Stage(Target):
    """Opens the sides of one experiment. A config is ``{"side": Side}``: flags alone do not say how many
    replicas there are, or how long clients wait."""

    def __init__(
        self, where: str, model: str, *, acceptance: float = 0.6, log_dir: Path | None = None
    ) -> None:
        """Raises ExperimentError for a place that cannot be read."""
        self.name, self.model, self._acceptance = where, model, acceptance
        self._log_dir = log_dir
        self.simulated = where.startswith(SIMULATED)
        if not self.simulated and where != BUNDLED_MODEL:
            raise ExperimentError(f"--target {where}: write {BUNDLED_MODEL}, or {SIMULATED}h100 and the like")

    @property
    def defaults(self) -> Mapping[str, int]:
        """Flags whose defaults depend on the device."""
        return gpu_defaults(self.name)

    def target_of(self, side: ExperimentSide) -> Target:
        """The kind of server that ``side`` runs on. Raises ExperimentError."""
        if not self.simulated:
            return ServerTarget.bundled(self.model, log_dir=self._log_dir)
        try:
            return SimulatedTarget(
                SIMULATED + packaged("times", self.name.removeprefix(SIMULATED)),
                packaged("shape", side.model or self.model),
                replicas=side.replicas,
                routing=cast("Policy", side.routing),
                acceptance=self._acceptance,
            )
        except SimulatedTargetError as error:
            raise ExperimentError(str(error)) from None

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenTarget]:
        side: ExperimentSide = config["side"]
        with ExitStack() as stack:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a flag without effect is what some experiments show
                server = stack.enter_context(self.target_of(side).open(side.engine))
            yield _Open(server, side)

    def launch_command(self, config: Mapping[str, Any]) -> str:
        side: ExperimentSide = config["side"]
        return self.target_of(side).launch_command(side.engine)


class _Open(OpenTarget):
    """A server with clients of a certain patience, and the scrapes of all replicas in one."""

    def __init__(self, server: OpenTarget, side: ExperimentSide) -> None:
        self._server, self._side = server, side
        self.url, self.model, self.max_model_len = server.url, server.model, server.max_model_len
        self.start_seconds, self.log_path = server.start_seconds, server.log_path

    def run(
        self,
        schedule: Schedule,
        progress: Callable[..., None] | None = None,
        stop: threading.Event | None = None,
        *,
        timeout: float = 600.0,
        drain: float | None = None,
    ) -> Records:
        records = self._server.run(
            schedule, progress, stop, timeout=min(timeout, self._side.timeout), drain=drain
        )
        parts: Sequence[Records] = getattr(self._server, "parts", ())
        return replace(records, scrapes=fleet_scrapes(parts)) if parts else records

    def scrape(self) -> str:
        return self._server.scrape()

    def log_tail(self, lines: int = 30) -> str:
        return self._server.log_tail(lines)


def fleet_scrapes(parts: Sequence[Records]) -> tuple[tuple[int, str], ...]:
    """The replicas' scrapes as one page a second, told apart by an ``instance`` label.

    A replica without work has stopped its clock; its page stays what it was.
    """
    moments = sorted({at for part in parts for at, _ in part.scrapes})
    pages = [deque(part.scrapes) for part in parts]
    merged = []
    for moment in moments:
        for page in pages:
            while len(page) > 1 and page[1][0] <= moment:
                page.popleft()
        texts = (_labelled(page[0][1], f"replica-{number}") for number, page in enumerate(pages))
        merged.append((moment, "".join(texts)))
    return tuple(merged)


def _labelled(text: str, instance: str) -> str:
    def add(match: re.Match[str]) -> str:
        return f'{match[1]}{{instance="{instance}"' + ("," if match[2] else "}")

    return "".join(
        line if line.startswith("#") else _SAMPLE.sub(add, line, count=1) for line in text.splitlines(True)
    )


def packaged(kind: str, name: str) -> str:
    """A file of the package by its name (the shape ``8b``, the times ``two-cores``), or ``name`` itself."""
    file = resources.files("playbooks").joinpath(f"{kind}-{name}.json")
    with resources.as_file(file) as path:
        return str(path) if path.is_file() else name


def stage_of(experiment: Experiment, target: str | None, model: str | None, log_dir: Path | None) -> Stage:
    """``target`` and ``model`` replace those of the page. Raises ExperimentError."""
    where = target or experiment.target
    own = experiment.model if where.startswith(SIMULATED) == experiment.simulated else BUNDLED_MODEL
    if own == BUNDLED_MODEL and where.startswith(SIMULATED):
        own = BUNDLED_SHAPE  # its weights are not needed, so they need not be fetched
    return Stage(where, model or own, acceptance=experiment.acceptance, log_dir=log_dir)


def opened(stage: Stage, side: ExperimentSide) -> AbstractContextManager[OpenTarget]:
    return stage.open({"side": side})
