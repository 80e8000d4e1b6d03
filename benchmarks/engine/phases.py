"""Static batching, prefill and decode in turn, and one token budget: one workload on all three schedulers.

    python -m benchmarks.engine.phases [--quick] [--real] [--times bundled|h100|FILE] [--part PART...]

Simulated by default: the real schedulers on a virtual clock, with step times that are measured on the
bundled engine first (10 s), those of a file, or a roofline estimate of an 8B model on an H100. ``--real``
computes the same workloads, shortened, with the bundled model.

utilisation  share of the computed token slots that were of use: neither padding nor computed before
bubbles      share of the wanted sequence slots, over time, in which no request was served
stall        the longest gap between two tokens of a request, median over requests
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.engine.baselines import Setting, add_options, make_setting
from engine.baselines.occupancy import Occupancy
from engine.config import EngineConfig, SchedulerName
from engine.core import EngineCore
from engine.request import SamplingParams
from engine.sim.simulated_runner import (
    ModelSize,
    RequestTimeline,
    SimulatedRunner,
    TimedRequest,
    VirtualClock,
    own_prompt,
    run_workload,
)
from engine.sim.step_times import StepTimes
from engine.step import StepOutput, StepPlan

PHASES: tuple[SchedulerName, ...] = ("static", "two-track", "unified")
PARTS = ("picture", "online", "offline", "memory")
VOCABULARY = 49_000


@dataclass(frozen=True)
class Row:
    """What one run came to. Times in seconds."""

    label: str
    utilisation: float
    bubbles: float
    ttft: tuple[float, float]
    """P50, P99."""
    itl: tuple[float, float]
    stall: float
    throughput: float
    """Output tokens per second, from the first arrival to the last token."""
    preemptions: int


def run(setting: Setting, requests: Sequence[TimedRequest], label: str, **flags: Any) -> Row:
    runner, clock = setting.make()
    core = EngineCore(replace(setting.config, **flags), runner, clock)
    occupancy = Occupancy(core.config.max_num_seqs)
    timelines = run_workload(core, clock, requests, occupancy.observe)
    return summarize(label, timelines, occupancy)


def summarize(label: str, timelines: Sequence[RequestTimeline], occupancy: Occupancy) -> Row:
    gaps = np.concatenate([timeline.itl for timeline in timelines])
    ttft = np.array([timeline.ttft for timeline in timelines])
    tokens = sum(timeline.request.num_output_tokens for timeline in timelines)
    span = max(t.finished for t in timelines) - min(t.request.arrival_time for t in timelines)
    return Row(
        label=label,
        utilisation=occupancy.utilisation,
        bubbles=occupancy.bubble_share,
        ttft=(float(np.percentile(ttft, 50)), float(np.percentile(ttft, 99))),
        itl=(float(np.percentile(gaps, 50)), float(np.percentile(gaps, 99))),
        stall=float(np.median([max(timeline.itl, default=0.0) for timeline in timelines])),
        throughput=tokens / span,
        preemptions=sum(timeline.request.num_preemptions for timeline in timelines),
    )


def heavy_tailed(count: int, rate: float, seed: int) -> list[TimedRequest]:
    """Chat with heavy-tailed answers, and one request in eight with a long document. Poisson arrivals."""
    rng = np.random.default_rng(seed)
    requests, now = [], 0.0
    for place in range(count):
        now += rng.exponential(1 / rate)
        document = place % 8 == 5
        prompt = int(rng.integers(700, 1500)) if document else int(rng.integers(20, 150))
        output = int(rng.integers(10, 60)) if document else int(np.clip(rng.lognormal(3.6, 1.0), 4, 400))
        requests.append(request(place, now, prompt, output, rng))
    return requests


def equal(count: int, seed: int) -> list[TimedRequest]:
    """Equal requests, all there at the start."""
    rng = np.random.default_rng(seed)
    return [request(place, 0.0, 128, 64, rng) for place in range(count)]


def request(place: int, arrival: float, prompt: int, output: int, rng: np.random.Generator) -> TimedRequest:
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return TimedRequest(f"r{place}", arrival, rng.integers(100, VOCABULARY, prompt).tolist(), sampling)


# ---------------------------------------------------------------- four requests


def four_requests() -> None:
    """3, 8, 2 and 4 tokens in a batch of four, and two more that wait: which request is in which slot at each
    step."""
    print(
        "Four requests of 3, 8, 2 and 4 tokens, a step a column; P prefill, D decode, E end token, x padding"
    )
    for phase, lengths in (
        ("static", {"A": 3, "B": 8, "C": 2, "D": 4}),
        *((phase, {"A": 3, "B": 8, "C": 2, "D": 4, "E": 5, "F": 5}) for phase in PHASES),
    ):
        picture(phase, lengths)


def picture(phase: SchedulerName, lengths: dict[str, int]) -> None:
    clock = VirtualClock()
    ends = {name: length + 1 for name, length in lengths.items()}  # the token that ends it takes a slot too
    size = ModelSize(weights_bytes=0, kv_bytes_per_token=1, max_model_len=64)
    runner = SimulatedRunner(size, StepTimes(launch=1.0), clock, output_lengths=ends)
    config = EngineConfig(
        scheduler=phase,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=32,
    )
    cells: dict[str, list[str]] = {name: [] for name in lengths}

    def note(plan: StepPlan, output: StepOutput, seconds: float) -> None:
        ended = {request.request_id for request in output.finished}
        for name, row in cells.items():
            row.append(" ")
            for item in plan.scheduled:
                if item.request.request_id == name:
                    row[-1] = "E" if name in ended else "P" if item.start == 0 else "D"
        left = [name for name, row in cells.items() if row[-1] == " " and "E" in row]
        for name in left[-len(plan.padding) :] if plan.padding else ():
            cells[name][-1] = "x"

    core = EngineCore(config, runner, clock)
    sampling = SamplingParams(max_tokens=32)
    requests = [TimedRequest(n, 0.0, own_prompt(place, 1), sampling) for place, n in enumerate(lengths)]
    run_workload(core, clock, requests, note)
    steps = len(cells["A"])
    print(
        f"\n{phase}: {sum(lengths.values())} tokens in {steps} steps of 4 slots: "
        f"{sum(lengths.values()) / (4 * steps):.0%} of the slots"
    )
    for name, row in cells.items():
        print(f"  {name} |{'|'.join(row)}|")


# ---------------------------------------------------------------- tables


def table(title: str, rows: Iterator[Row]) -> None:
    print(f"\n{title}")
    print(
        f"{'':<22}{'utilisation':>12}{'bubbles':>9}{'TTFT P50':>10}{'P99':>9}{'ITL P50':>9}{'P99':>9}"
        f"{'stall':>9}{'tok/s':>9}{'preempted':>11}   ms"
    )
    for row in rows:
        times = "".join(
            f"{value * 1e3:>{width}.{0 if value >= 1 else 1}f}"
            for value, width in zip((*row.ttft, *row.itl, row.stall), (10, 9, 9, 9, 9), strict=True)
        )
        print(
            f"{row.label:<22}{row.utilisation:>12.1%}{row.bubbles:>9.1%}{times}{row.throughput:>9.0f}"
            f"{row.preemptions:>11}",
            flush=True,
        )


def online(setting: Setting, count: int, seed: int) -> None:
    requests = heavy_tailed(count, setting.rate, seed)
    small = setting.config.max_num_batched_tokens // 8
    ways: dict[str, dict[str, object]] = {phase: {"scheduler": phase} for phase in PHASES}
    ways[f"unified, budget {small}"] = {"max_num_batched_tokens": small}
    table(
        f"Online, heavy-tailed answers: {count} requests, {setting.rate:g} a second",
        (run(setting, requests, label, **flags) for label, flags in ways.items()),
    )


def offline(setting: Setting, seed: int) -> None:
    requests = equal(4 * setting.config.max_num_seqs, seed)
    table(
        f"Offline, equal requests (128 in, 64 out): {len(requests)} requests at once",
        (run(setting, requests, phase, scheduler=phase) for phase in PHASES),
    )


def pressure(setting: Setting, count: int, seed: int) -> None:
    """A pool that holds a quarter of what would run: which requests are preempted, and what it costs."""
    blocks = 1 + setting.config.max_num_seqs * 160 // setting.config.block_size
    tight = {"num_gpu_blocks_override": blocks, "max_model_len": 640}
    rng = np.random.default_rng(seed)
    requests = [request(place, 0.0, 64, int(rng.integers(100, 400)), rng) for place in range(count)]
    ways = (
        ("two-track, recompute", {"scheduler": "two-track"}),
        ("two-track, swap", {"scheduler": "two-track", "preemption_mode": "swap"}),
        ("unified", {"scheduler": "unified"}),
        ("unified, prefix cache", {"scheduler": "unified", "enable_prefix_caching": True}),
    )
    table(
        f"Too little memory ({blocks - 1} blocks): {count} requests at once, 64 in, 100 to 400 out",
        (run(setting, requests, label, **tight, **flags) for label, flags in ways),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--part", choices=PARTS, nargs="+", default=PARTS, help="which of the tables (default: all)"
    )
    options = parser.parse_args()
    parts, seed = options.part, options.seed
    if "picture" in parts:
        four_requests()
    if parts == ["picture"]:
        return
    short = options.quick or options.real
    setting = make_setting(options)
    print(f"\n=== {setting.name}; {setting.config.max_num_seqs} sequences")
    if "online" in parts:
        online(setting, 32 if short else 600, seed)
    if "offline" in parts:
        offline(setting, seed)
    if "memory" in parts:
        pressure(setting, setting.config.max_num_seqs * (1 if short else 3), seed)


if __name__ == "__main__":
    main()
