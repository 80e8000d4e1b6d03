"""What a study says in the end of what it could not prove."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.measure.estimator import Estimate
from servers.slo.objective import PRESETS, parse_slo
from tuner.runs.result import Measurement, Reading
from tuner.study.outcome import Kind, Outcome, now_held, what_would_prove


def seen(effect: float, figure: str) -> Estimate:
    low, ratio, high = (math.exp(effect + by) for by in (-0.2, 0, 0.2))
    return Estimate(figure, 4, 1.0, ratio, ratio, low, high, 0.1)


@pytest.mark.parametrize(
    ("effect", "needed", "problem", "advice"),
    [
        (0.02, 9, "no proven gain", "A gain of less than 5 %"),
        (-0.1, 9, "no proven gain", "A gain of less than 5 %"),
        (0.11, 9, "ttft_es95 …: missed", "give bounds of your own as --slo"),
        (0.11, 9, "no proven gain", "About 9 pairs would prove it: give a larger --budget, or --pairs 9"),
        (0.3, 3, "held, but its interval reaches beyond the limit", "About 5 pairs would prove it"),
        (0.08, math.inf, "no proven gain", "The pairs scatter too much"),
    ],
    ids=["hardly a gain", "a loss", "a bound is missed", "more pairs", "one more pair", "scatter"],
)
@pytest.mark.parametrize("slo", ["itl", "throughput"])
def test_what_would_prove_a_gain(slo: str, effect: float, needed: float, problem: str, advice: str) -> None:
    name = PRESETS[slo].objective.name
    main = seen(effect if slo == "throughput" else -effect, name)
    told: Any = SimpleNamespace(
        change=lambda figure: main,
        problems=(problem,),
        missed="missed" in problem,
        pairs=4,
        pairs_needed=needed,
    )
    assert advice in what_would_prove(PRESETS[slo], told)


def test_nothing_would_prove_what_has_no_ratio() -> None:
    told: Any = SimpleNamespace(change=lambda figure: Estimate(figure, 4, 0.0, 1.0), problems=("x",), pairs=4)
    assert what_would_prove(PRESETS["itl"], told) == ""


def test_a_bound_that_the_users_own_config_misses_is_named() -> None:
    """Goodput may be the same, and the other config still the one to run."""
    slo = parse_slo("ttft_p95<1s,itl_p99<100ms")
    sides = [
        Measurement(
            {n: Reading(v, 100) for n, v in zip(("ttft_p95", "itl_p99", "failed"), each, strict=True)}, 60.0
        )
        for each in ((0.5, 0.14, 0.0), (0.6, 0.0621, 0.0))
    ]
    told: Any = SimpleNamespace(baseline=sides[0], candidate=sides[1])
    assert now_held(slo, told) == "holds itl_p99 <= 100 ms, which your config misses (140 ms -> 62.1 ms), "
    held: Any = SimpleNamespace(baseline=sides[1], candidate=sides[0])
    assert now_held(slo, held) == ""


@pytest.mark.parametrize(
    ("kind", "code"),
    [("better", 0), ("baseline", 0), ("measured", 0), ("infeasible", 1), ("failed", 1), ("interrupted", 130)],
)
def test_exit_codes(kind: Kind, code: int) -> None:
    assert Outcome(kind, "", "").exit_code == code
