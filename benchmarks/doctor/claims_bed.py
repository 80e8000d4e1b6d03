"""A simulated server to try a claim on: a model's shape, a device, flags; one load, one set of figures."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import shape
from engine.sim.server import Simulation
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import Arrival, ClosedLoop, Constant, Poisson
from loadgen.plan.workload import Length, PlannedRequest, RequestClass, Schedule, Workload, schedule_hash
from loadgen.targets.simulated import SimulatedTarget

Flags = Mapping[str, Any]
REQUESTS = 1500
"""Of an open loop: enough for a P99."""

CONTEXTS = {"7B": 16_384, "8B": 40_960}
"""Tokens, where a claim needs others than OTHERWISE."""
OTHERWISE = 32_768


@dataclass(frozen=True)
class Bed:
    """``model`` (of shapes.py) on ``device`` (``h100`` …), with the flags of both sides."""

    model: str
    device: str
    flags: Flags
    active: float = 1.0
    """Share of the parameters that a token is computed with; a step reads all of them."""
    acceptance: float = 0.7

    @property
    def name(self) -> str:
        count = self.flags.get("tensor_parallel_size", 1)
        return f"{self.model} on {count} {self.device}"

    @cached_property
    def target(self) -> SimulatedTarget:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            context = CONTEXTS.get(self.model, OTHERWISE)
            config = shape(self.model, context, torch_dtype="bfloat16")
            path.write_text(json.dumps(config), encoding="utf-8")
            return _SparseTarget(f"simulated:{self.device}", str(path), self.active, self.acceptance)

    def run(self, flags: Flags, schedule: Schedule) -> Run:
        with self.target.open({**self.flags, **flags}) as server:
            return Run(server.run(schedule))

    def offered(self, flags: Flags, classes: Sequence[RequestClass], rate: float, seed: int = 0) -> Run:
        """An open loop: REQUESTS with Poisson arrivals at ``rate`` requests/s."""
        return self.run(flags, self.schedule(classes, Poisson(rate), seed, num_requests=REQUESTS))

    def saturated(
        self, flags: Flags, classes: Sequence[RequestClass], concurrency: int, requests: int
    ) -> Run:
        """A closed loop of ``concurrency``, to its end."""
        return self.run(flags, self.schedule(classes, ClosedLoop(concurrency), 0, num_requests=requests))

    def schedule(
        self, classes: Sequence[RequestClass], arrival: Arrival, seed: int, **extent: Any
    ) -> Schedule:
        workload = Workload("claim", tuple(classes))
        return workload.schedule(seed=1 + seed, arrival=arrival, warmup=0, **extent)


class _SparseTarget(SimulatedTarget):
    """Products take ``active`` of the time that a dense model of this size needs."""

    def __init__(self, name: str, model: str, active: float, acceptance: float) -> None:
        self._active = active
        super().__init__(name, model, acceptance=acceptance)

    def simulation(self, config: Flags) -> Simulation:
        dense = super().simulation(config)
        per_token = dense.times.per_token * self._active
        return replace(dense, times=replace(dense.times, per_token=per_token))


@dataclass(frozen=True)
class Run:
    """What a load came to."""

    records: Records

    @cached_property
    def summary(self) -> Summary:
        return Summary(self.records)

    def ms(self, metric: str, cls: str | None = None) -> float:
        """A latency in milliseconds."""
        return self.summary.value(metric, cls) * 1e3

    @property
    def throughput(self) -> float:
        """Output tokens/s over the whole run."""
        served = [request for request in self.records.requests if request.ok]
        return sum(request.tokens for request in served) / self._seconds

    @property
    def request_rate(self) -> float:
        return sum(request.ok for request in self.records.requests) / self._seconds

    @property
    def _seconds(self) -> float:
        return max(request.end for request in self.records.requests) / 1e9

    def first(self, cls: str) -> float:
        """TTFT of the one request of ``cls``, in milliseconds."""
        (request,) = (r for r in self.records.requests if r.cls == cls)
        return (request.chunk_at[0] - request.intended) / 1e6

    def longest_gap(self, cls: str) -> float:
        """The longest gap between two tokens of any request of ``cls``, in milliseconds."""
        gaps = (
            later - earlier
            for r in self.records.requests
            if r.cls == cls
            for earlier, later in zip(r.chunk_at, r.chunk_at[1:], strict=False)
        )
        return max(gaps) / 1e6


def of(name: str, weight: float, prompt: int, output: int, spread: float = 0.3, **more: Any) -> RequestClass:
    """A class whose lengths are uniform, ``spread`` to both sides of their means."""
    return RequestClass(name, weight, Length(prompt, spread), Length(output, spread), **more)


def beside(streams: int, guest: RequestClass, at: float, output: int) -> Schedule:
    """``streams`` short prompts that decode ``output`` tokens, and one of ``guest`` after ``at`` seconds."""
    crowd = Workload("crowd", (of("stream", 1, 64, output, 0.0),))
    base = crowd.schedule(seed=1, arrival=Constant(1e4), num_requests=streams, warmup=0)
    (late,) = (
        Workload("guest", (guest,)).schedule(seed=2, arrival=Constant(1.0), num_requests=1, warmup=0).requests
    )
    guest_request = PlannedRequest(
        index=streams,
        cls=guest.name,
        intended=at,
        prompt_token_ids=late.prompt_token_ids,
        prompt=None,
        max_tokens=late.max_tokens,
    )
    requests = (*base.requests, guest_request)
    digest = schedule_hash(requests, "open", None, None)
    text = f"{streams} streams, and {guest.name} after {at:g} s"
    return Schedule(requests, (), "open", None, None, digest, text, 1)
