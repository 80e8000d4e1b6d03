"""Words that can be judged, and what intervals make of them."""

from __future__ import annotations

import math

import pytest

from doctor.diagnosis.expectation import ExpectationError, judge_expectation, parse_expectation
from loadgen.measure.estimator import Estimate, estimate


def seen(low: float, ratio: float, high: float, figure: str = "throughput") -> Estimate:
    return Estimate(figure, 4, 1.0, ratio, ratio, low, high)


@pytest.mark.parametrize(
    ("text", "interval", "outcome"),
    [
        ("falls", (0.3, 0.4, 0.5), "met"),
        ("falls", (0.7, 0.9, 1.2), "open"),
        ("falls", (0.97, 1.0, 1.02), "missed"),
        ("falls with the chunk", (1.2, 1.3, 1.4), "missed"),
        ("rises", (1.2, 1.3, 1.4), "met"),
        ("rises", (0.9, 1.1, 1.3), "open"),
        ("rises", (0.7, 0.8, 0.9), "missed"),
        ("-50% to -75%", (0.2, 0.3, 0.45), "met"),
        ("-50% to -75%", (0.05, 0.1, 0.15), "met"),
        ("-50% to -75%", (0.6, 0.7, 0.8), "missed"),
        ("-50%", (0.4, 0.6, 0.8), "met"),
        ("+10% for the long prompt", (0.9, 1.0, 1.05), "met"),
        ("+10%", (1.0, 1.1, 1.2), "open"),
        ("+10%", (1.15, 1.2, 1.3), "missed"),
        ("towards 0", (0.0, 0.1, 0.3), "met"),
        ("towards 0", (0.6, 0.7, 0.8), "missed"),
        ("0", (0.3, 0.5, 0.7), "open"),
        ("unchanged", (0.95, 1.0, 1.05), "met"),
        ("unchanged", (0.8, 1.0, 1.2), "open"),
        ("unchanged", (1.2, 1.3, 1.4), "missed"),
        ("may rise", (1.2, 5.0, 9.0), "allowed"),
    ],
)
def test_an_interval_decides(text: str, interval: tuple[float, float, float], outcome: str) -> None:
    assert judge_expectation(parse_expectation(text), seen(*interval)) == outcome


def test_a_tail_has_to_move_by_more_than_a_median() -> None:
    assert judge_expectation(parse_expectation("falls"), seen(0.88, 0.9, 0.92, "itl_p50")) == "met"
    assert judge_expectation(parse_expectation("falls"), seen(0.88, 0.9, 0.92, "itl_p99")) == "missed"


def test_a_range_is_where_side_b_ends() -> None:
    assert (
        judge_expectation(parse_expectation("0.7 to 0.9"), estimate("kv_max", [1.0, 1.0], [0.8, 0.8]))
        == "met"
    )
    assert (
        judge_expectation(parse_expectation("0.7 to 0.9"), estimate("kv_max", [1.0, 1.0], [0.2, 0.2]))
        == "missed"
    )


def test_counts_that_may_be_none_are_compared_by_their_differences() -> None:
    gone = estimate("preemptions", [10.0, 12.0, 8.0], [0.0, 0.0, 0.0])
    assert (gone.a, gone.b, gone.ratio) == (10.0, 0.0, 0.0)
    assert judge_expectation(parse_expectation("0"), gone) == "met"
    some = estimate("preemptions", [10.0, 12.0, 8.0], [0.0, 1.0, 0.0])
    assert some.low == 0.0
    assert judge_expectation(parse_expectation("towards 0"), some) == "met"


def test_what_side_a_never_had_cannot_fall() -> None:
    none = estimate("preemptions", [0.0, 0.0], [0.0, 0.0])
    assert judge_expectation(parse_expectation("falls"), none) == "missed"
    assert judge_expectation(parse_expectation("unchanged"), none) == "met"
    assert judge_expectation(parse_expectation("towards 0"), none) == "open", "there was none to lose"
    assert (
        judge_expectation(parse_expectation("rises"), estimate("preemptions", [0.0, 0.0], [3.0, 4.0]))
        == "met"
    )


def test_a_figure_that_is_missing_decides_nothing() -> None:
    unknown = estimate("preemptions", [math.nan, 1.0], [1.0, 1.0])
    assert judge_expectation(parse_expectation("falls"), unknown) == "open"


def test_a_single_pair_proves_nothing() -> None:
    assert judge_expectation(parse_expectation("falls"), estimate("itl_p99", [10.0], [1.0])) == "open"


@pytest.mark.parametrize("text", ["better", "a little less", "towards the baseline", ""])
def test_words_that_cannot_be_judged_are_refused(text: str) -> None:
    with pytest.raises(ExpectationError, match="cannot be judged: begin with falls"):
        parse_expectation(text)
