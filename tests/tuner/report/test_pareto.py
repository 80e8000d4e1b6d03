import math
from typing import Any

import pytest

from tuner.report.pareto import pareto_front
from tuner.runs.result import Measurement, Reading, TrialResult


def trial(
    number: int, itl: float, ttft: float, throughput: float, missed: float = -0.1, status: Any = "measured"
) -> TrialResult:
    figures = {"itl_es99": itl, "ttft_es95": ttft, "throughput": throughput}
    measurement = Measurement({name: Reading(value) for name, value in figures.items()}, 20.0)
    return TrialResult(
        number, {"n": number}, "test", status, measurement=measurement, violations={"bound": missed}
    )


def numbers(front: Any) -> list[Any]:
    return [r.number for r in front.trials]


def test_the_front_holds_what_no_other_trial_beats() -> None:
    worse_in_all, cheap, balanced, fast = (
        trial(0, 0.4, 0.5, 90.0),
        trial(1, 0.1, 2.0, 60.0),
        trial(2, 0.12, 0.5, 100.0),
        trial(3, 0.4, 0.4, 120.0),
    )
    front = pareto_front([worse_in_all, cheap, balanced, fast])
    assert numbers(front) == [1, 2, 3], "by the first metric"
    assert front.knee == 2, "near the best of all three figures"
    assert front.values(balanced) == (0.12, 0.5, 100.0)


@pytest.mark.parametrize("excluded", [{"missed": 0.2}, {"status": "stopped"}])
def test_what_is_not_feasible_or_not_measured_whole_is_no_choice(excluded: dict[str, Any]) -> None:
    front = pareto_front([trial(0, 0.4, 0.5, 90.0), trial(1, 0.1, 0.1, 200.0, **excluded)])
    assert numbers(front) == [0]


def test_a_trial_without_a_figure_is_left_out() -> None:
    assert numbers(pareto_front([trial(0, math.nan, 0.5, 90.0), trial(1, 0.2, 0.5, math.inf)])) == []
    assert pareto_front([]).knee is None


def test_of_equal_trials_the_first_stays() -> None:
    front = pareto_front([trial(4, 0.1, 0.5, 90.0), trial(2, 0.1, 0.5, 90.0)])
    assert numbers(front) == [2]
    assert front.knee == 2
