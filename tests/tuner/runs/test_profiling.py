import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from analytic_target import AnalyticServer, AnalyticTarget

from loadgen.plan.workload import preset
from servers.slo.objective import PRESETS
from tuner.job.job import Job
from tuner.runs.profiling import FIRST_LOOP_REQUESTS, Profile, find_capacity, fitting_scale, time_alone
from tuner.study.load_selection import LoadSelection
from tuner.study.observer import Observer

MIXED = preset("mixed", max_model_len=8192)


def server(**target: Any) -> AnalyticServer:
    return AnalyticServer(
        AnalyticTarget(**target), {"max_num_batched_tokens": 2048, "long_prefill_token_threshold": 0}
    )


def run(opened: Any, schedule: Any) -> Any:
    return opened.run(schedule)


def test_loops_grow_until_one_is_long_enough() -> None:
    found = find_capacity(server(), MIXED, 0, seconds=45.0, run=run, max_seqs=64)
    assert [count for count, _, _ in found] == [FIRST_LOOP_REQUESTS, 2 * FIRST_LOOP_REQUESTS]
    assert [concurrency for _, concurrency, _ in found] == [FIRST_LOOP_REQUESTS, 64]
    assert all(rate == pytest.approx(2.0, rel=0.5) for _, _, rate in found), "it serves a request every 0.5 s"


def test_a_server_that_fails_everything_has_no_capacity() -> None:
    ((_, _, rate),) = find_capacity(server(failing=lambda c: True), MIXED, 0, 30.0, run, 64)
    assert math.isnan(rate)


def test_what_a_lone_request_takes() -> None:
    alone = time_alone(server(), 8192, 0, run)
    assert alone.prefill_speed == pytest.approx(1024 / (0.025 + 0.0006 * 2000))
    assert (alone.itl, alone.steady) == (pytest.approx(0.03), True)
    unknown = time_alone(server(failing=lambda c: True), 8192, 0, run)
    assert math.isnan(unknown.prefill_speed)
    assert math.isnan(unknown.itl)


@pytest.mark.parametrize(
    ("slowed", "pairs", "speed", "steady"),
    [
        ((1.0, 1.05), 1, 1.0, True),
        ((2.0, 1.0, 1.7, 1.05), 2, 1.0, True),
        ((1.7, 1.4, 1.2, 3.0, 1.0, 1.9, 1.6, 2.0), 4, 1.0, False),
    ],
)
def test_lone_requests_are_timed_until_two_agree(
    slowed: tuple[float, ...], pairs: int, speed: float, steady: bool
) -> None:
    alone, factors, schedules = server(), iter(slowed), []

    def slow(record: Any) -> Any:
        factor = next(factors)
        at = tuple(record.intended + int(factor * (chunk - record.intended)) for chunk in record.chunk_at)
        return replace(record, chunk_at=at)

    def disturbed(opened: Any, schedule: Any) -> Any:
        schedules.append(schedule.sha256)
        records = opened.run(schedule)
        return replace(records, requests=tuple(map(slow, records.requests)))

    found = time_alone(alone, 8192, 0, disturbed)
    undisturbed = time_alone(server(), 8192, 0, run).prefill_speed
    assert found.prefill_speed == pytest.approx(speed * undisturbed)
    assert (found.steady, len(schedules)) == (steady, pairs)
    assert len(set(schedules)) == pairs, "the same prompts would be in the prefix cache"


def test_a_survey_survives_the_storage() -> None:
    profile = Profile(8192, math.nan, 1000.0, ((40, 40, 1.25),), rate=0.875)
    again = Profile.from_json(profile.to_json())
    assert math.isnan(again.start_seconds)
    assert again.capacity == profile.capacity
    assert again.rate == profile.rate


def test_a_survey_says_what_it_found() -> None:
    open_loop = Profile(8192, 1.0, 1000.0, ((40, 40, 1.25),), rate=0.875)
    assert open_loop.describe() == (
        "capacity 1.25 req/s (40 requests in a closed loop of 40); offered: 0.88 req/s (70%)"
    )
    closed = Profile(8192, 1.0, 1000.0, ((40, 16, 1.25),), concurrency=16)
    assert closed.describe().endswith("measured in a closed loop of 16")


@pytest.mark.parametrize(
    ("speed", "longest"),
    [(1000.0, 2000), (50_000.0, 6000), (math.nan, 6000)],
    ids=["slow", "fast", "unknown"],
)
def test_prompts_are_scaled_to_the_context_and_to_a_slow_device(speed: Any, longest: int) -> None:
    scaled = preset("mixed", max_model_len=8192, scale=fitting_scale("mixed", 8192, speed))
    assert max(cls.prompt.high for cls in scaled.classes) == pytest.approx(longest, rel=0.01)


@pytest.mark.parametrize(
    ("start", "job", "seconds"),
    [
        (2.0, {}, 20.0),
        (40.0, {"budget": 2400.0}, 40.0),
        (40.0, {"budget": 600.0}, 20.0),
        (40.0, {"budget": 1200.0}, 30.0),
        (300.0, {"budget": None, "trials": 5}, 90.0),
        (40.0, {"budget": 2400.0, "run_seconds": 12.0}, 12.0),
        (40.0, {"budget": 2400.0, "target": "simulated:h100"}, 20.0),
    ],
    ids=["quick", "slow", "short of time", "some time", "minutes", "as asked", "simulated"],
)
def test_a_run_is_as_long_as_a_start(start: float, job: dict[str, Any], seconds: float) -> None:
    served = server()
    served.start_seconds = start
    bench: Any = SimpleNamespace(run=run, observer=Observer())
    profile = LoadSelection(Job(rate=1.0, **job), PRESETS["itl"], bench).profile(served)
    assert profile.run_seconds == seconds
