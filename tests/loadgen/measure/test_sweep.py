"""Sweeps on made-up servers: the highest level is found, undecided is said, and no noise decides alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from made_runs import records
from scipy.stats import t

from loadgen.commands.sweep_command import conclusions, sweep_json, sweep_table
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.measure.sweep import PRIOR_RUNS, SPREAD, Capacity, Sweep, SweepError
from servers.slo.bounds import parse_bounds

BOUND = parse_bounds("itl_p50<20ms")


def server(
    gap: Callable[[float], float], *, noise: float = 0.0, capacity: float = math.inf
) -> Callable[[float, int], Records]:
    """A run at a level has gaps of ``gap(level)`` ms, off by ``noise`` (log) from run to run."""

    def measure(level: float, seed: int) -> Records:
        wobble = math.exp(np.random.default_rng(seed).normal(0, noise)) if noise else 1.0
        run = records(gap=gap(level) * wobble)
        return replace(run, verdict="server_saturated") if level > capacity else run

    return measure


def steady(level: float) -> float:
    """Meets 20 ms up to a level of 10."""
    return 2.0 * level


@pytest.mark.parametrize("start", [0.3, 9.0, 10.4, 200.0])
def test_the_highest_level_is_found_from_either_side(start: float) -> None:
    found = Sweep(server(steady), BOUND).highest(start, tolerance=0.05)
    assert found.best is not None
    assert found.limit is not None
    assert 9.0 < found.best.value < 10.1  # the interval, not the point, must be below 20 ms
    assert found.limit.value / found.best.value <= 1.06


def test_the_answer_is_a_level_that_was_measured_and_met() -> None:
    found = Sweep(server(steady, noise=0.05), BOUND, max_runs=4).highest(4.0)
    assert found.best is not None
    assert found.best.decision == "met"
    assert all(level.decision != "met" for level in found.levels if level.value > found.best.value)


def test_far_from_the_bound_one_run_decides_and_close_to_it_several_must() -> None:
    found = Sweep(server(steady, noise=0.05), BOUND, max_runs=6).highest(2.0, tolerance=0.02)
    runs = {level.value: len(level.runs) for level in found.levels}
    assert runs[2.0] == runs[4.0] == 1
    assert max(runs.values()) > 2
    near = max(runs, key=lambda value: runs[value])
    assert abs(math.log(near / 10)) < 0.2


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Two runs a level with a spread of 15 %; the bound is the true value: "met" and "missed" are errors."""
    wrong = 0
    for seed in range(300):
        sweep = Sweep(server(lambda level: 20.0, noise=0.15), BOUND, seed=1000 * seed, max_runs=2)
        wrong += sweep.curve([1.0], repeats=2).levels[0].decision != "undecided"
    assert wrong / 300 < 0.10


def test_levels_share_one_estimate_of_the_spread() -> None:
    found = Sweep(server(steady, noise=0.5), BOUND).curve([1.0, 2.0, 3.0, 4.0], repeats=2)
    widths = [level.estimates[0].high / level.estimates[0].low for level in found.levels]
    assert widths == pytest.approx([widths[0]] * 4)
    figures = np.log([[Summary(run).value("itl_p50") for run in level.runs] for level in found.levels])
    squares = PRIOR_RUNS * SPREAD**2 + ((figures - figures.mean(axis=1, keepdims=True)) ** 2).sum()
    half = t.ppf(0.975, PRIOR_RUNS + 4) * math.sqrt(squares / (PRIOR_RUNS + 4) / 2)
    assert math.log(widths[0]) == pytest.approx(2 * half)


def test_a_saturated_level_misses_whatever_its_percentiles_say() -> None:
    found = Sweep(server(lambda level: 1.0, capacity=5.0), BOUND).highest(1.0)
    assert found.best is not None
    assert found.limit is not None
    assert found.best.value <= 5.0 < found.limit.value
    assert "more than the server can serve" in conclusions(found)[0]


def test_failures_miss_every_bound_on_latency() -> None:
    def measure(level: float, seed: int) -> Records:
        return records(gap=1.0, failed=0 if level <= 3 else 40)

    found = Sweep(measure, BOUND).highest(1.0)
    assert found.best is not None
    assert found.best.value <= 3


def test_no_level_that_meets_the_bounds_is_an_answer() -> None:
    found = Sweep(server(lambda level: 50.0), BOUND).highest(4.0)
    assert found.best is None
    assert "No level is shown to meet the bounds" in conclusions(found)[0]
    assert sweep_json(found)["best"] is None


def test_a_server_that_never_misses_ends_the_search() -> None:
    found = Sweep(server(lambda level: 1.0), BOUND).highest(1.0)
    assert found.best is not None
    assert found.best.value >= 1000
    assert "no higher level was tried" in conclusions(found)[0]


def test_concurrency_is_whole_and_one_is_the_least() -> None:
    found = Sweep(server(lambda level: 15.0 + level), BOUND, over="concurrency").highest(16)
    assert all(level.value == round(level.value) >= 1 for level in found.levels)
    assert found.best is not None
    assert found.best.value in (3, 4)


def test_too_few_samples_and_unknown_classes_are_said_and_not_guessed() -> None:
    with pytest.raises(SweepError, match=r"ttft_p99 cannot be told from 60 samples per run"):
        Sweep(server(steady), parse_bounds("ttft_p99<1s")).highest(1.0)
    with pytest.raises(SweepError, match=r"itl_p50\{class=vip\}: no class 'vip'"):
        Sweep(server(steady), parse_bounds("itl_p50{class=vip}<1s")).highest(1.0)


def test_a_client_that_was_the_limit_ends_the_sweep() -> None:
    def measure(level: float, seed: int) -> Records:
        return replace(records(), verdict="client_limited", reasons=("the loop was late",))

    with pytest.raises(SweepError, match=r"rate 1 the client was the limit.*the loop was late"):
        Sweep(measure, BOUND).highest(1.0)


def test_an_interrupted_sweep_keeps_what_it_has() -> None:
    runs = 0

    def measure(level: float, seed: int) -> Records:
        nonlocal runs
        runs += 1
        return replace(records(gap=1.0), partial=runs == 3)

    found = Sweep(measure, BOUND, stop=lambda: runs >= 3).highest(1.0)
    assert found.interrupted
    assert [level.value for level in found.levels] == [1.0, 2.0]


def test_every_run_has_a_seed_of_its_own() -> None:
    seeds = []

    def measure(level: float, seed: int) -> Records:
        seeds.append(seed)
        return records(gap=10.0)

    Sweep(measure, seed=7).curve([1.0, 2.0], repeats=3)
    assert seeds == list(range(7, 13))


def test_the_knee_is_where_throughput_over_response_time_is_largest() -> None:
    """Throughput grows with the level up to 8 and response time beyond it."""

    def measure(level: float, seed: int) -> Records:
        run = records(gap=10.0 * max(1.0, level / 8) ** 2)
        return replace(run, window=(0.0, 100.0 / min(level, 8.0)))

    found = Sweep(measure).curve([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert found.knee is not None
    assert found.knee.value == 8.0
    assert "knee" in sweep_table(found)[4][-1]
    assert Capacity("rate", found.levels[:2], 0.1).knee is None


def test_tables_and_json_agree_on_every_level() -> None:
    found = Sweep(server(steady), BOUND).highest(4.0)
    rows, answer = sweep_table(found), sweep_json(found)
    assert [row[0] for row in rows[1:]] == [f"{level['level']:g}" for level in answer["levels"]]
    assert answer["best"] == found.best.value if found.best else False
    assert all(len(row) == len(rows[0]) for row in rows)


@pytest.mark.parametrize(("start", "tolerance"), [(0.0, 0.1), (1.0, 0.0)])
def test_a_search_needs_a_start_and_a_tolerance(start: float, tolerance: float) -> None:
    with pytest.raises(SweepError, match="must be positive"):
        Sweep(server(steady), BOUND).highest(start, tolerance)
    with pytest.raises(SweepError, match="at least 1"):
        Sweep(server(steady), BOUND, max_runs=0)
