import math
from typing import Any

import pytest

from tuner.job.job import Job, UsageError
from tuner.runs.result import TrialResult
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
    [
        ("90", 90),
        ("90s", 90),
        ("10m", 600),
        ("10min", 600),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("9m30s", 570),
        ("0.5", 0.5),
    ],
)
def test_parse_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--budget") == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "10x", "m", "ten minutes", "1.2.3s"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--budget: .* is no length of time"):
        parse_seconds(text, "--budget")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (42, "42 s"),
        (119, "119 s"),
        (120, "2 min"),
        (121, "2 min 1 s"),
        (570, "9 min 30 s"),
        (600, "10 min"),
        (7140, "119 min"),
        (7200, "2 h 0 min"),
        (7500, "2 h 5 min"),
    ],
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
    assert choose_pairs(1000.0, 40.0, 25.0) == 8
    assert choose_pairs(1000.0, 40.0, 25.0, exclusive=True) == 5


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


def after(status: Any = "measured", total: float = 40.0, levels: float = 0.0, **job: Any) -> Plan:
    seconds = {"start": 6.0, "total": total}
    baseline = TrialResult(0, {}, "baseline", status, seconds=seconds, records=("1.json", "2.json"))
    return Plan.after(
        baseline, Job(**job), run_seconds=20.0, levels_seconds=levels, spent_seconds=50.0, exclusive=True
    )


def test_the_plan_goes_by_what_the_baseline_took() -> None:
    made = after(budget=1000.0, trials=9)
    assert (made.start_seconds, made.trial_seconds, made.run_seconds) == (6.0, 40.0, 20.0 + 14.0 / 2)
    assert (made.budget_seconds, made.max_trials, made.spent_seconds) == (1000.0, 9, 50.0)
    assert made.pairs == choose_pairs(1000.0, 6.0, 27.0, exclusive=True) == 8
    assert made.exclusive
    short = after(total=10.0, budget=1000.0)
    assert (short.trial_seconds, short.run_seconds) == (20.0, 20.0)


def test_pairs_that_are_asked_for_are_planned_and_none_of_a_baseline_that_failed() -> None:
    assert after(pairs=5).pairs == 5
    assert after(status="failed", pairs=5).pairs == 0


def test_time_is_kept_for_other_loads_only_where_they_are_measured() -> None:
    assert after(budget=1000.0).loads_seconds == 0.0
    assert after(budget=None, levels=30.0).loads_seconds == 0.0
    assert after(budget=1000.0, levels=30.0).loads_seconds == 3 * (6 + 30)
    assert after(budget=400.0, levels=30.0).loads_seconds == 0.25 * 400


def test_the_search_has_what_is_left_beside_all_that_is_kept() -> None:
    assert plan(loads_seconds=100.0).search_seconds == 600 - 60 - plan().confirm_seconds - 100
    assert plan(spent_seconds=599.0).search_seconds == 0.0
    assert plan(pairs=0).confirm_seconds == 0.0
    assert plan(pairs=1).confirm_seconds == 64.0
    assert plan(trial_seconds=0.5).affordable_trials == (2 * (600 - 60 - 226))
    assert plan(trial_seconds=0.0, max_trials=4).affordable_trials == 4


def test_the_shares_and_limits_of_a_plan() -> None:
    assert (MIN_PAIRS, MAX_RESERVED_PAIRS, MAX_PAIRS) == (3, 8, 16)
    least = (10 + 4 * 54.0) / 0.55
    assert choose_pairs(least + 0.1, 5.0, 25.0) == 4
    assert choose_pairs(least - 0.1, 5.0, 25.0) == 3


def test_a_clock_counts_from_what_was_spent_and_follows_a_faster_one() -> None:
    now = [1000.0]
    fresh, clock = Clock(now=lambda: now[0]), Clock(30.0, lambda: now[0])
    now[0] += 5
    assert (fresh.spent, clock.spent) == (5.0, 35.0)
    clock.advance_to(20.0)
    assert clock.spent == 35.0
    clock.advance_to(50.0)
    assert clock.spent == 50.0


def test_a_shortage_counts_five_trials_beside_all_that_is_kept() -> None:
    wanted = (60 + 226 + 120 + 5 * 35) / 60
    assert f"Give --budget {math.ceil(wanted)}m" in plan(loads_seconds=120.0).shortage
    assert "Give --budget 10m" in plan(spent_seconds=199.0).shortage
    assert "Give --budget 11m" in plan(spent_seconds=200.0).shortage


def test_the_plan_names_the_other_loads_and_what_is_proven_at_once() -> None:
    assert "90 s for other loads" in plan(loads_seconds=90.0).describe()
    assert "other loads" not in plan().describe()
    at_once = "no trial is affordable"
    assert at_once not in plan(budget_seconds=60 + 226 + 36.0).describe()
    assert at_once in plan(budget_seconds=60 + 226 + 34.0).describe()
    assert "in up to 4 pairs" in plan(budget_seconds=60 + 226 + 34.0).describe()
    assert at_once not in plan(budget_seconds=62.0, pairs=0).describe()
