import math
from typing import Any

import pytest

from tuner.job.job import UsageError
from tuner.study.budget import (
    MAX_PAIRS,
    MAX_RESERVED_PAIRS,
    MIN_PAIRS,
    Clock,
    Plan,
    choose_pairs,
    format_seconds,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("10m", 600), ("10min", 600), ("1.5h", 5400), ("1h30m", 5400), ("9m30s", 570)],
)
def test_parse_seconds(text: str, seconds: int) -> None:
    assert parse_seconds(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "10x", "m", "ten minutes", "1.2.3s"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--budget: .* is no length of time"):
        parse_seconds(text, "--budget")


@pytest.mark.parametrize(
    ("seconds", "text"), [(42, "42 s"), (570, "9 min 30 s"), (600, "10 min"), (7500, "2 h 5 min")]
)
def test_format_seconds(seconds: int, text: str) -> None:
    assert format_seconds(seconds) == text


def plan(**changes: Any) -> Plan:
    values = {
        "start_seconds": 5.0,
        "trial_seconds": 35.0,
        "run_seconds": 25.0,
        "pairs": 4,
        "budget_seconds": 600.0,
        "max_trials": None,
        "spent_seconds": 60.0,
    }
    return Plan(**{**values, **changes})


def test_the_confirmation_is_paid_for_before_any_trial() -> None:
    assert plan().confirm_seconds == 2 * 5 + 2 * 4 * (25 + 2)
    assert plan().affordable_trials == int((600 - 60 - plan().confirm_seconds) / 35)


def test_a_number_of_trials_limits_as_well() -> None:
    assert plan(max_trials=2).affordable_trials == 2
    assert plan(budget_seconds=None, max_trials=7).affordable_trials == 7
    assert plan(budget_seconds=None, max_trials=7).search_seconds == math.inf


def test_a_budget_that_is_spent_affords_nothing() -> None:
    assert plan(spent_seconds=599.0).affordable_trials == 0


def test_the_plan_says_what_it_rests_on() -> None:
    text = plan().describe()
    assert "a start costs 5.0 s" in text
    assert "4 pairs of runs" in text
    assert f"about {plan().affordable_trials} trials" in text
    assert "up to 7 trials" in plan(budget_seconds=None, max_trials=7).describe()


def test_pairs_follow_the_budget_within_limits() -> None:
    assert choose_pairs(60.0, 5.0, 25.0) == MIN_PAIRS
    assert choose_pairs(570.0, 5.0, 25.0) == 5
    assert choose_pairs(1e5, 5.0, 25.0) == MAX_RESERVED_PAIRS
    assert choose_pairs(None, 5.0, 25.0) == MAX_RESERVED_PAIRS
    assert choose_pairs(1000.0, 40.0, 25.0) == 7
    assert choose_pairs(1000.0, 40.0, 25.0, exclusive=True) == 4


def test_time_that_is_left_is_for_more_pairs_of_one_candidate_or_of_two() -> None:
    left = 2 * 5 + 2 * 6 * (25 + 2)
    assert plan().pairs_within(600.0 - left) == 6
    assert plan().pairs_within(600.0 - 2 * left, candidates=2) == 6
    assert plan(loads_seconds=54.0).pairs_within(600.0 - left) == 5
    assert plan(budget_seconds=1e5).pairs_within(0.0) == MAX_PAIRS
    assert plan().pairs_within(700.0) == 0


def test_the_clock_goes_on_from_what_was_spent() -> None:
    assert Clock(100.0).spent >= 100.0


def test_a_budget_that_affords_no_trial_says_which_would() -> None:
    short = plan(budget_seconds=280.0)
    assert short.affordable_trials == 0
    assert "Give --budget 8m" in short.shortage
    assert plan(budget_seconds=480.0).affordable_trials >= 5
