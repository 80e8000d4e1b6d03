"""A line for each step of an engine: what it did, and how long the host and the device took."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from engine.sim.step_times import StepLoad, StepSample

if TYPE_CHECKING:
    from engine.core import EngineCore, Runner
    from engine.step import StepPlan, StepResult


class RecordingRunner:
    """Another runner, and a note of how long each step took: ``samples``.

    The host's time is what passes between two steps, so the loop around it must not idle; call ``pause``
    where it does.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.samples: list[StepSample] = []
        self.weights_bytes, self.kv_bytes_per_token = runner.weights_bytes, runner.kv_bytes_per_token
        self._runner, self._clock = runner, clock
        self._ended: float | None = None

    @property
    def max_model_len(self) -> int:
        return self._runner.max_model_len

    def profile_activation(self) -> int:
        return self._runner.profile_activation()

    def allocate(self, num_blocks: int) -> None:
        self._runner.allocate(num_blocks)

    def allocate_host(self, num_blocks: int) -> None:
        self._runner.allocate_host(num_blocks)

    def execute(self, plan: StepPlan) -> StepResult:
        began = self._clock()
        result = self._runner.execute(plan)
        ended = self._clock()
        if plan.scheduled:
            host = None if self._ended is None else began - self._ended
            self.note(StepSample(StepLoad.of(plan), ended - began, host, ended))
        self._ended = self._clock()
        return result

    def note(self, sample: StepSample) -> None:
        self.samples.append(sample)

    def pause(self) -> None:
        """The time until the next step is idle, not the host's work."""
        self._ended = None


class StepLog(RecordingRunner):
    """Takes the place of an engine's runner, and writes each step to a file as it ends.

    A line is a JSON array: the fields of :class:`StepLoad`, seconds of the device, and of the host since the
    step before (null where the engine had idled), and when it ended, on the system's monotonic clock. Steps
    that overlap cannot be told apart: an engine with async scheduling goes without.
    """

    def __init__(self, core: EngineCore, path: str | Path) -> None:
        super().__init__(core.runner)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        if not core.config.async_scheduling:
            core.runner = self

    def note(self, sample: StepSample) -> None:
        line = step_line(sample)
        os.write(self._file, f"{line}\n".encode())  # unbuffered: an engine's end may come at any moment


def step_line(sample: StepSample) -> str:
    """A step's line in a log."""
    return json.dumps([*astuple(sample.load), sample.device_seconds, sample.host_seconds, sample.ended])


def read_step_log(text: str) -> list[StepSample]:
    """The steps of a log; a last line that is cut off is left out. Raises ValueError for another file."""
    whole, _, _ = text.rpartition("\n")
    samples = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            *load, device, host, ended = json.loads(line)
            samples.append(StepSample(StepLoad(*load), device, host, ended))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} is no step of a step log: {line[:60]!r} ({error})") from None
    return samples
