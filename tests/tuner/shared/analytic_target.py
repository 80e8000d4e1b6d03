"""A target as a formula: configs and schedules in, records out, without a server, a clock or noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord
from loadgen.plan.workload import PlannedRequest, Schedule
from loadgen.target import OpenTarget, RunFailed, StartFailed, Target
from tuner.runs.result import Measurement, Reading
from tuner.runs.scrape import MIN_SCRAPES

DEFAULTS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128, "long_prefill_token_threshold": 0}
CLOSED_GAP = 0.5
"""Seconds after which a closed loop sends its next request."""
IDLE = ClientStats("test", 1, cpu=0.1, wall=20.0, reads=100, lag_p50=1e-4, lag_p99=5e-4, lag_max=1e-3)


def stall(config: Mapping[str, Any]) -> float:
    """Seconds of a step that is full: 25 ms and 0.6 ms a token."""
    budget = min(config["max_num_batched_tokens"], config["long_prefill_token_threshold"] or 1 << 30, 2000)
    return 0.025 + 0.0006 * budget


def ttft(config: Mapping[str, Any], prompt: int) -> float:
    return math.ceil(prompt / config["max_num_batched_tokens"]) * stall(config)


class AnalyticTarget(Target):
    """``fault(config)`` may raise, when a server is opened or when it is loaded."""

    name = "analytic"

    def __init__(
        self,
        start_fault: Callable[[Mapping[str, Any]], None] = lambda config: None,
        run_fault: Callable[[Mapping[str, Any]], None] = lambda config: None,
        itl_factor: Callable[[Mapping[str, Any], int | None], float] = lambda config, seed: 1.0,
        failing: Callable[[Mapping[str, Any]], bool] = lambda config: False,
        stall_every: int = 20,
    ) -> None:
        self.stall_every = stall_every
        self.start_fault, self.run_fault, self.itl_factor, self.failing = (
            start_fault,
            run_fault,
            itl_factor,
            failing,
        )
        self.opened: list[dict[str, Any]] = []
        self.open_now = 0

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[AnalyticServer]:
        self.opened.append(dict(config))
        effective = {**DEFAULTS, **config}
        self.start_fault(effective)
        self.open_now += 1
        try:
            yield AnalyticServer(self, effective)
        finally:
            self.open_now -= 1

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return "analytic " + " ".join(f"--{k}={v}" for k, v in config.items())


class AnalyticServer(OpenTarget):
    max_model_len = 8192
    start_seconds = 2.0

    def __init__(self, target: AnalyticTarget, config: Mapping[str, Any]) -> None:
        self.target, self.config = target, config

    def run(
        self, schedule: Schedule, progress: Any = None, stop: Any = None, **limits: float | None
    ) -> Records:
        self.target.run_fault(self.config)
        end = schedule.duration or math.inf
        begins = [r.intended or CLOSED_GAP * k for k, r in enumerate(schedule.requests)]
        due = [(r, begin) for r, begin in zip(schedule.requests, begins, strict=True) if begin <= end]
        factor = self.target.itl_factor(self.config, schedule.seed)
        requests = tuple(self._served(request, begin, factor) for request, begin in due)
        return Records(
            schedule_sha256=schedule.sha256,
            schedule=schedule.description,
            mode=schedule.mode,
            concurrency=schedule.concurrency,
            planned=len(schedule.requests),
            requests=requests,
            window=(0.0, max(begin for _, begin in due)),
            client=IDLE,
            environment={"machine": "none"},
            start_unix_ms=0,
            seed=schedule.seed,
            steady=False,
            verdict="ok",
            scrapes=tuple((1000 * second, self.scrape()) for second in range(MIN_SCRAPES)),
        )

    def _served(self, request: PlannedRequest, begin: float, factor: float) -> RequestRecord:
        """Every ``stall_every``-th token comes after a full step, the others after 30 ms."""
        first = begin + ttft(self.config, len(request.prompt_token_ids or ()))
        every, full = self.target.stall_every, stall(self.config) * factor
        gaps = [0.03 if k % every else full for k in range(1, request.max_tokens)]
        stamps = [first]
        for gap in gaps:
            stamps.append(stamps[-1] + gap)
        at = tuple(round(stamp * 1e9) for stamp in stamps)
        broken = self.target.failing(self.config)
        return RequestRecord(
            index=request.index,
            cls=request.cls,
            intended=round(begin * 1e9),
            sent=round(begin * 1e9),
            end=at[-1],
            chunk_at=at,
            chunk_tokens=(1.0,) * len(at),
            failure=Failure.HTTP_ERROR if broken else None,
            detail="500 engine error" if broken else "",
            finish_reason="length",
            completion_tokens=len(at),
            max_tokens=request.max_tokens,
        )

    def scrape(self) -> str:
        blocks = 8000 - self.config["max_num_batched_tokens"]
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            'vllm:num_requests_running{engine="0"} 7.0\n'
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}} 1.0\n'
        )

    def log_tail(self, lines: int = 30) -> str:
        return "last line of the log"


def does_not_start(config: Mapping[str, Any]) -> None:
    raise StartFailed("out_of_memory", "CUDA out of memory", "Traceback\ntorch.OutOfMemoryError")


def dies_under_load(config: Mapping[str, Any]) -> None:
    raise RunFailed("killed", "the server was ended by SIGKILL", "Killed")


def measure(config: Mapping[str, Any]) -> Measurement:
    """What a config would measure, by the same formula."""
    budget, seqs = config["max_num_batched_tokens"], config["max_num_seqs"]
    itl = stall(config) + 0.0005 * min(seqs, 32)
    capacity = 100 / (1 + 60 / budget) * min(1, seqs / 8)
    values = {
        "itl_es99": itl,
        "ttft_es95": ttft(config, 2000) * (1 + max(0, 8 / seqs - 0.5)),
        "throughput": min(75.0, capacity),
        "failed": 0.0,
    }
    return Measurement({name: Reading(value, 1000) for name, value in values.items()}, window=20.0)
