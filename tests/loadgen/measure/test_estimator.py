"""The statistics behind a comparison, on numbers made for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.loadgen.coverage import WORLDS, coverage
from loadgen.measure.estimator import (
    Estimate,
    Verdict,
    estimate,
    floor_of,
    holm,
    judge_estimate,
    overall,
    rises,
    samples_needed,
)


def test_interval_and_p_are_students_on_log_ratios() -> None:
    a, b = [10.0, 12.0, 9.0, 11.0], [13.0, 14.0, 12.5, 13.0]
    effect = estimate("ttft_p50", a, b)
    logs = np.log(np.array(b) / np.array(a))
    expected = stats.ttest_1samp(logs, 0)
    interval = expected.confidence_interval(0.95)
    assert effect.p == pytest.approx(expected.pvalue)
    assert (effect.low, effect.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert effect.ratio == pytest.approx(effect.b / effect.a)


def test_two_pairs_give_an_honestly_wide_interval() -> None:
    effect = estimate("ttft_p50", [100, 100], [50, 60])
    assert effect.low < 0.2
    assert effect.high > 1.5


def test_one_pair_proves_nothing() -> None:
    effect = estimate("ttft_p50", [100], [10])
    assert (effect.low, effect.high, effect.p) == (0, math.inf, 1)
    assert judge_estimate(effect, 1.0) == "inconclusive"


def test_equal_runs_have_a_point_interval() -> None:
    effect = estimate("ttft_p50", [3, 4], [3, 4])
    assert effect == Estimate("ttft_p50", 2, effect.a, effect.b, 1, 1, 1, 1)
    assert (effect.a, effect.b) == pytest.approx((12**0.5, 12**0.5))


def test_wild_pairs_do_not_overflow() -> None:
    effect = estimate("ttft_p50", [1e-300, 1e300], [1e300, 1e-300])
    assert effect.low == 0
    assert effect.high == pytest.approx(math.exp(700))


def test_a_value_of_none_is_compared_by_differences_and_a_failed_one_not_at_all() -> None:
    gone = estimate("preemptions", [10.0, 12.0], [0.0, 0.0])
    assert (gone.a, gone.b, gone.ratio) == (11.0, 0.0, 0.0)
    failed = estimate("itl_p99", [1.0, 2.0], [1.0, math.inf])
    assert not failed.has_ratio
    assert (failed.a, failed.b) == (1.5, math.inf)
    nothing = estimate("itl_p99", [], [])
    assert (nothing.pairs, nothing.percent) == (0, "n/a")


@pytest.mark.parametrize(
    ("a", "b"), [([0.0, 100, 100, 100], [1.0, 100, 101, 100]), ([10.0, 12.0, 11.0], [0.0, 5.0, 1.0])]
)
def test_where_a_value_is_0_the_change_is_of_differences(a: list[float], b: list[float]) -> None:
    """Against the mean of A; no ratio is below 0."""
    effect = estimate("preemptions", a, b)
    shares = (np.array(b) - a) / np.mean(a)
    expected = stats.ttest_1samp(shares, 0)
    interval = expected.confidence_interval(0.95)
    assert (effect.a, effect.b, effect.p) == pytest.approx((np.mean(a), np.mean(b), expected.pvalue))
    assert effect.ratio == pytest.approx(1 + shares.mean())
    assert (effect.low, effect.high) == pytest.approx((max(0, 1 + interval.low), 1 + interval.high))


@pytest.mark.parametrize(
    ("a", "b", "known"),
    [
        ([0, 0], [0, 3], False),
        ([0.5, 0], [0.25, 0], True),
        ([-1, 0.5], [1, 1], False),
        ([0, 0], [0, 0], False),
    ],
)
def test_there_is_no_ratio_to_nothing(a: list[float], b: list[float], known: bool) -> None:
    assert estimate("preemptions", a, b).has_ratio == known


def test_small_values_have_geometric_means_too() -> None:
    effect = estimate("itl_p99", [0.2, 0.8], [0.4, 0.9])
    assert (effect.a, effect.b) == pytest.approx((0.4, 0.6))
    assert effect.ratio == pytest.approx(1.5)
    assert estimate("itl_p99", [1, 1], [2, 2]).p == 0


def test_how_many_samples_a_figure_needs() -> None:
    assert [samples_needed(name) for name in ("itl_p99", "ttft_p90", "throughput", "failed")] == [
        299,
        29,
        1,
        1,
    ]


def test_words_for_a_change() -> None:
    assert Estimate("itl_p99", 4, 1.0, 0.34, 0.34, 0.28, 0.42).percent == "-66 % [-72, -58]"
    assert Estimate("itl_p99", 1, 1.0, 0.34, 0.34, 0.0, math.inf).percent == "-66 % [-100, ∞]"
    assert Estimate("itl_p99", 4, 1.0, 12.0, 12.0, 11.0, 13.0).percent == "12.0 times [+1000, +1200]"
    assert Estimate("itl_p99", 4, 1.0, 9.5, 9.5, 0.5, 99.5).percent == "+850 % [-50, +9850]"
    assert Estimate("itl_p99", 4, 1.0, 10.0, 10.0, 1.0, 100.0).percent == "10.0 times [+0, ∞]"
    assert Estimate("failed", 4, 0.0, 3.0).percent == "0 -> 3"
    assert Estimate("itl_p99", 4, math.nan, 3.0).percent == "nan -> 3"


def test_holm_by_hand() -> None:
    # 4 x 0.01 = 0.04, 3 x 0.02 = 0.06, 2 x 0.03 = 0.06, 1 x 0.04 = 0.04 lifted to 0.06
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def _effect(ratio: float, low: float, high: float) -> Estimate:
    return Estimate("ttft_p50", 8, 1.0, ratio, ratio, low, high, 0.01)


@pytest.mark.parametrize(
    ("effect", "p", "more_is_better", "verdict"),
    [
        (_effect(1.20, 1.10, 1.31), 0.01, False, "regress"),
        (_effect(1.20, 1.10, 1.31), 0.01, True, "improve"),
        (_effect(1.06, 1.051, 1.07), 0.03, False, "regress"),
        (_effect(1.06, 1.051, 1.07), 0.05, False, "inconclusive"),
        (_effect(0.80, 0.70, 0.91), 0.01, False, "improve"),
        (_effect(0.80, 0.70, 0.91), 0.01, True, "regress"),
        (_effect(1.20, 1.10, 1.31), 0.06, False, "inconclusive"),  # not after Holm's adjustment
        (_effect(1.03, 1.02, 1.04), 0.01, False, "pass"),  # proven, below the floor
        (_effect(1.04, 1.02, 1.06), 0.01, False, "inconclusive"),  # may exceed the floor
        (_effect(0.97, 0.96, 0.98), 0.01, False, "pass"),  # better, below the floor
        (_effect(1.00, 0.90, 1.11), 0.90, False, "inconclusive"),
        (_effect(1.00, 0.97, 1.03), 0.90, False, "pass"),
        (_effect(1.00, 0.97, 1.03), 0.90, True, "pass"),
        (_effect(0.60, 0.00, math.inf), 1.00, True, "inconclusive"),
    ],
)
def test_judge(effect: Estimate, p: float, more_is_better: bool, verdict: Verdict) -> None:
    seen = replace(effect, figure="throughput" if more_is_better else "ttft_p50")
    assert judge_estimate(seen, p) == verdict


def test_the_worst_verdict_decides() -> None:
    assert overall(["pass", "improve", "pass"]) == "improve"
    assert overall(["pass", "improve", "inconclusive"]) == "inconclusive"
    assert overall(["regress", "inconclusive"]) == "regress"
    assert overall(["regress", "invalid"]) == "invalid"
    assert overall([]) == "invalid"


def test_floors_and_directions() -> None:
    assert [floor_of(m) for m in ("ttft_p50", "throughput", "e2e_mean")] == [0.05] * 3
    assert [floor_of(m) for m in ("ttft_p95{class=short}", "itl_p99", "max_stall")] == [0.15] * 3
    assert [m for m in ("throughput", "goodput{class=a}", "itl_p99", "tpot_mean") if rises(m)] == [
        "throughput",
        "goodput{class=a}",
    ]


def test_false_alarms_and_power_over_eight_pairs_of_noisy_runs() -> None:
    """Three metrics, 8 pairs, run-to-run noise of 2 % (medians) and 8 % (tail), 1,000 comparisons."""
    rng = np.random.default_rng(7)
    noise = {"ttft_p50": 0.02, "throughput": 0.02, "itl_p99": 0.08}

    def verdicts(slower: float) -> list[Verdict]:
        effects = []
        for metric, spread in noise.items():
            a, b = np.exp(rng.normal(0, spread, (2, 8)))
            effects.append(estimate(metric, a, b * (1 / slower if rises(metric) else slower)))
        return [
            judge_estimate(effect, p) for effect, p in zip(effects, holm([e.p for e in effects]), strict=True)
        ]

    same = [verdicts(1.0) for _ in range(1000)]
    slower = [verdicts(1.1) for _ in range(1000)]
    assert sum("regress" in found for found in same) <= 50
    assert sum(found[0] == "regress" for found in slower) >= 900


@pytest.mark.parametrize("name", WORLDS)
def test_intervals_of_four_pairs_hold_the_true_change(name: str) -> None:
    """Of 300 drawn comparisons; ``benchmarks.loadgen.coverage`` draws thousands.

    A P99 that jumps is held more often than asked for, never less.
    """
    shares = coverage(WORLDS[name], pairs=4, draws=300)
    assert min(shares.values()) >= 0.91, shares
    assert all(shares[smooth] <= 0.985 for smooth in ("mean", "es95")), shares
