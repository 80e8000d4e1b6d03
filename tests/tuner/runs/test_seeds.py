"""A study that is resumed, or repeated with its seed, sends the requests that it sent before."""

from typing import Any

import pytest

from loadgen.plan.traces import Trace, TraceRow
from loadgen.plan.workload import Schedule, preset
from tuner.runs.load import GeneratedLoad, capacity_schedule, lone_schedule
from tuner.runs.replay import ReplayLoad
from tuner.runs.seeds import Seeds

MIXED = preset("mixed", max_model_len=8192)


def seeds_of(schedules: tuple[Schedule, ...]) -> list[int | None]:
    return [schedule.seed for schedule in schedules]


def replayed() -> ReplayLoad:
    rows = tuple(TraceRow(float(second), 30, 5, "chat") for second in range(480))
    return ReplayLoad(Trace("short", rows), seed=3, seconds=80.0, max_model_len=4096)


@pytest.mark.parametrize(("request_set", "first"), [(0, 30_000), (1, 35_002), (2, 35_004)])
def test_a_closed_loop_is_drawn_in_two_parts(request_set: int, first: int) -> None:
    assert seeds_of(GeneratedLoad(MIXED, 3, 75.0, concurrency=2).rungs(request_set)) == [first, first + 1]


@pytest.mark.parametrize(("request_set", "first"), [(0, 30_000), (1, 35_002), (2, 35_004)])
def test_an_open_loop_is_drawn_whole_and_cut(request_set: int, first: int) -> None:
    assert seeds_of(GeneratedLoad(MIXED, 3, 80.0, rate=2.0).rungs(request_set)) == [first, first]


@pytest.mark.parametrize(("request_set", "first"), [(0, 30_000), (1, 35_001), (2, 35_002)])
def test_a_window_of_a_trace_is_drawn_whole_and_cut(request_set: int, first: int) -> None:
    assert seeds_of(replayed().rungs(request_set)) == [first, first]


@pytest.mark.parametrize(
    "load", [GeneratedLoad(MIXED, 3, 20.0, rate=2.0), replayed()], ids=["made", "recorded"]
)
def test_confirmations_and_other_levels(load: Any) -> None:
    assert load.confirmation_seeds(3) == [31_000, 31_001, 31_002]
    assert load.confirmation(31_002).seed == 31_002
    assert load.at_level(1.0, repeat=2).seed == 39_002


def test_what_a_survey_sends() -> None:
    assert lone_schedule(32_000, 64, 4, seed=3, attempt=2).seed == 32_002
    assert capacity_schedule(MIXED, 3, count=40, concurrency=16).seed == 33_040


def test_a_confirmations_seed_says_which_pair_it_is_of() -> None:
    seeds = Seeds(3)
    assert [seeds.pair(seed) for seed in seeds.confirmation(4)] == [0, 1, 2, 3]
