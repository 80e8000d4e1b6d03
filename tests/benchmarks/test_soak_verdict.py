"""The judge of a soak: what is a leak, and what is none."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.engine.soak_verdict import GROWTH_MB, SPARE_FILES, Rest, Trend, judge, steady

CALM = [Rest(60.0 * i, 0.0, 0, True, 900.0, 200.0, 20, 15) for i in range(30)]


def with_values(**values: list[Any]) -> list[Rest]:
    rows = ({name: column[i] for name, column in values.items()} for i in range(len(CALM)))
    return [replace(rest, **row) for rest, row in zip(CALM, rows, strict=True)]


def test_a_calm_server_passes() -> None:
    noise = random.Random(0)
    rests = with_values(engine_mb=[900 + noise.gauss(0, 15) for _ in CALM])
    assert judge(rests, [], 0) == []


@pytest.mark.parametrize("name", ["engine_mb", "api_mb"])
def test_steady_growth_is_a_leak(name: str) -> None:
    noise = random.Random(1)
    leak = [500 + i * 2 * GROWTH_MB / 29 + noise.gauss(0, 3) for i in range(30)]
    (problem,) = judge(with_values(**{name: leak}), [], 0)
    assert "grows" in problem


def test_growth_at_the_start_and_small_growth_are_none() -> None:
    warm = [500 + min(i, 9) * 30.0 for i in range(30)]
    small = [500 + i * 0.8 * GROWTH_MB / 29 for i in range(30)]
    assert judge(with_values(engine_mb=warm, api_mb=small), [], 0) == []


def test_noise_without_a_trend_is_none() -> None:
    saw = [500.0 + 200 * (i % 2) for i in range(30)]
    assert judge(with_values(engine_mb=saw), [], 0) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_usage": 0.01}, "KV blocks were still held (1.00%)"),
        ({"cache_reset": False}, "KV blocks were still held"),
        ({"unfinished": 2}, "2 requests were unfinished"),
    ],
)
def test_what_is_held_at_a_rest_is_told(change: dict[str, Any], words: str) -> None:
    rests = [*CALM[:10], replace(CALM[10], **change), *CALM[11:]]
    (problem,) = judge(rests, [], 0)
    assert words in problem
    assert "at 600 s" in problem


@pytest.mark.parametrize(("more", "count"), [(SPARE_FILES, 0), (SPARE_FILES + 1, 1)])
def test_descriptors_are_counted(more: int, count: int) -> None:
    rests = [*CALM[:-1], replace(CALM[-1], api_files=CALM[0].api_files + more)]
    assert len(judge(rests, [], 0)) == count


def test_faults_and_stuck_requests_are_passed_on() -> None:
    assert judge(CALM, ["500 for a regex"], 3) == ["fault: 500 for a regex", "3 requests did not end"]


def test_too_short_a_soak_says_nothing() -> None:
    assert judge(CALM[:2], [], 0) == ["too short: fewer than three rests"]


def test_the_line_through_samples() -> None:
    exact = Trend.of([0, 1, 2, 3], [1, 3, 5, 7])
    assert (exact.slope, exact.error, exact.rises) == (2, 0, True)
    rough = Trend.of([0, 1, 2, 3], [1, 3, 1, 3])
    assert rough.slope == pytest.approx(0.4)
    assert rough.error == pytest.approx(math.sqrt(3.2 / 2 / 5))
    assert not rough.rises
    assert Trend.of([0, 1], [0, 9]) == Trend(0.0, math.inf)


def test_the_first_third_is_warm_up() -> None:
    assert [rest.at for rest in steady(CALM)] == [60.0 * i for i in range(10, 30)]
    assert list(steady([])) == []
