"""What planning a step while the one before it computes is worth, for short steps and long ones.

    python -m benchmarks.engine.async_scheduling [--quick] [--real]

The host's time is measured: scheduler, books and metrics of this engine on this machine, in steady decoding
and in steps of one prompt, with and without async scheduling. The device's is a roofline estimate of an H100,
so the figures are simulated. ``--real`` is the bundled model on this CPU instead, where no core idles while a
step computes, so that there is nothing to gain.

as here  planning overlaps with the step before it; booking what that one emitted waits for it
all      if none of the host's time had to wait (the tokens would have to stay on the device)
vLLM     the same device with what its scheduler takes for schedule() and update() on two such cores (see
         benchmarks/engine/scheduler.py): why async scheduling matters there
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.engine.baselines import LLAMA_1B, LLAMA_8B, bundled_config
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.models.model_config import ModelConfig
from engine.request import SamplingParams
from engine.scheduling.scheduler import UnifiedScheduler
from engine.sim.devices import H100_SXM, roofline
from engine.sim.simulated_runner import (
    ModelSize,
    SimulatedRunner,
    TimedRequest,
    VirtualClock,
    WallClock,
    own_prompt,
    run_workload,
)
from engine.sim.step_times import StepTimes

NO_MODEL = ModelSize(weights_bytes=0, kv_bytes_per_token=1, max_model_len=4096)


@dataclass(frozen=True)
class Load:
    """Requests that make steps of one kind, and the config that keeps them so."""

    name: str
    count: int
    prompt: int
    output: int
    seqs: int

    def config(self, async_scheduling: bool = False) -> EngineConfig:
        return EngineConfig(
            max_model_len=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=self.seqs,
            num_gpu_blocks_override=1 + 256 * self.seqs,
            enable_prefix_caching=False,
            async_scheduling=async_scheduling,
        )

    def requests(self) -> list[TimedRequest]:
        sampling = SamplingParams(max_tokens=self.output, temperature=0.0, ignore_eos=True)
        return [
            TimedRequest(f"r{place}", 0.0, own_prompt(place, self.prompt), sampling)
            for place in range(self.count)
        ]


@dataclass(frozen=True)
class HostTime:
    """Seconds of a step on the host, medians."""

    planning: float
    booking: float

    @property
    def total(self) -> float:
        return self.planning + self.booking


VLLM_HOST = {"decode, 64": HostTime(0.48e-3, 0.22e-3), "decode, 256": HostTime(2.1e-3, 1.05e-3)}
"""Seconds of vLLM 0.33.0's scheduler in steady decoding."""


def loads(output: int) -> list[Load]:
    decode = [Load(f"decode, {batch}", batch, 256, output, batch) for batch in (1, 16, 64, 256)]
    return [*decode, Load("a prompt of 2,048", output, 2048, 1, 4)]


def measure_host(load: Load, ahead: bool) -> HostTime:
    """The engine's own time beside a runner that takes none."""
    runner = SimulatedRunner(NO_MODEL, StepTimes(), VirtualClock())
    core = EngineCore(load.config(ahead), runner, time.perf_counter)
    scheduler = core.scheduler
    assert isinstance(scheduler, UnifiedScheduler)
    for item in load.requests():
        core.add(item.make())
    planning, booking = [], []
    plan = scheduler.schedule()
    while core.has_unfinished:
        result = runner.execute(plan)
        began = time.perf_counter()
        upcoming = scheduler.schedule() if ahead else None
        planned = time.perf_counter()
        output = scheduler.update(plan, result)
        core.metrics.observe(plan, output, began)
        if upcoming is not None:
            plan = scheduler.reconcile(upcoming)
        booked = time.perf_counter()
        if upcoming is None:
            plan = scheduler.schedule()
        planning.append(planned - began if ahead else time.perf_counter() - booked)
        booking.append(booked - planned)
    return HostTime(statistics.median(planning), statistics.median(booking))


def seconds_a_step(load: Load, times: StepTimes, async_scheduling: bool) -> float:
    clock = VirtualClock()
    steps = 0

    def count(plan: object, output: object, seconds: float) -> None:
        nonlocal steps
        steps += 1

    core = EngineCore(load.config(async_scheduling), SimulatedRunner(NO_MODEL, times, clock), clock)
    run_workload(core, clock, load.requests(), count)
    return clock.now / steps


def simulate(all_loads: Sequence[Load]) -> None:
    print(f"{'':<33}{'----- host -----':>19}{'-- host, async --':>19}")
    print(
        f"{'model':<6}{'step':<20}{'device':>8}{'planning':>10}{'booking':>9}{'planning':>10}{'booking':>9}"
        f"{'step':>9}{'as here':>16}{'all':>16}   ms"
    )
    for name, model in (("1B", LLAMA_1B), ("8B", LLAMA_8B)):
        for load in all_loads:
            row(name, model, load, measure_host(load, False), measure_host(load, True))
            if load.name in VLLM_HOST:
                vllm = VLLM_HOST[load.name]
                row(f"{name} *", model, load, vllm, vllm)
    print("* with the host's times of vLLM's scheduler")


def row(name: str, model: ModelConfig, load: Load, host: HostTime, ahead: HostTime) -> None:
    device = roofline(model, H100_SXM)
    plain = seconds_a_step(load, replace(device, host=host.total, host_per_sequence=0.0), False)
    times = replace(device, host=ahead.total, host_per_sequence=0.0)
    cells = ""
    for overlap in (ahead.planning / ahead.total, 1.0):
        seconds = seconds_a_step(load, replace(times, overlap=overlap), True)
        cells += f"{seconds * 1e3:>8.2f}{plain / seconds - 1:>+8.1%}"
    shown = (plain - host.total, host.planning, host.booking, ahead.planning, ahead.booking, plain)
    print(
        f"{name:<6}{load.name:<20}"
        + "".join(
            f"{value * 1e3:>{width}.3f}" for value, width in zip(shown, (8, 10, 9, 10, 9, 9), strict=True)
        )
        + cells,
        flush=True,
    )


def real(rounds: int) -> None:
    """Tokens a second of the bundled model, with and without, in turn."""
    from engine.runner import ModelRunner

    load = Load("decode, 8", 8, 64, 48, 8)
    runner = ModelRunner(bundled_config())
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):
        for ahead in (False, True) if number % 2 else (True, False):
            clock = WallClock()
            core = EngineCore(replace(bundled_config(), async_scheduling=ahead), runner, clock)
            requests = [
                replace(item, prompt_token_ids=range(100 + place, 100 + place + load.prompt))
                for place, item in enumerate(load.requests())
            ]
            run_workload(core, clock, requests)
            if number:  # the first round warms up
                rates[ahead].append(load.count * load.output / clock())
    plain, overlapped = (statistics.median(rates[key]) for key in (False, True))
    print(
        f"bundled model, 8 requests, {rounds} rounds in turn: {plain:.1f} tok/s, "
        f"async {overlapped:.1f} tok/s ({overlapped / plain - 1:+.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--real", action="store_true", help="the bundled model on this CPU, nothing simulated"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    options = parser.parse_args()
    if options.real:
        real(2 if options.quick else 6)
    else:
        simulate(loads(64 if options.quick else 256))


if __name__ == "__main__":
    main()
