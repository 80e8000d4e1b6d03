"""What a study says in the end of what it could not prove."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.measure.estimator import Estimate
from servers.slo.objective import PRESETS
from tuner.study.outcome import Kind, Outcome, pairs_for_proof, what_would_prove

HALF = 0.1 * 3.182446 / 2
"""Of an interval in logarithms, where four pairs scatter by a tenth (Student's t of 3 degrees: 3.182)."""


def seen(effect: float, pairs: int = 4, half: float = HALF, figure: str = "itl_es99") -> Estimate:
    low, ratio, high = (math.exp(effect + sign * half) for sign in (-1, 0, 1))
    return Estimate(figure, pairs, 1.0, ratio, ratio, low, high, 0.1)


@pytest.mark.parametrize(
    ("effect", "pairs"),
    [(-0.16, 4), (0.16, 4), (-0.13, 5), (-0.11, 6), (-0.1, 7), (-0.02505, 64), (-0.0249, None), (0.0, None)],
)
def test_the_pairs_that_would_prove_an_effect_if_they_scatter_alike(effect: float, pairs: int | None) -> None:
    assert pairs_for_proof(seen(effect)) == pairs


def test_one_pair_or_an_open_interval_says_nothing_of_others() -> None:
    assert pairs_for_proof(seen(-0.5, pairs=1)) is None
    assert pairs_for_proof(seen(-0.5, pairs=2, half=0.4)) == 2
    assert pairs_for_proof(Estimate("itl_es99", 4, 1.0, 0.9, 0.9, 0.0, 2.0)) is None
    assert pairs_for_proof(Estimate("itl_es99", 4, 1.0, 0.9, 0.9, 0.5, math.inf)) is None


@pytest.mark.parametrize(
    ("effect", "half", "problem", "advice"),
    [
        (0.02, HALF, "no proven gain", "A gain of less than 5 %"),
        (-0.1, HALF, "no proven gain", "A gain of less than 5 %"),
        (0.11, HALF, "ttft_es95 …: missed", "give bounds of your own as --slo"),
        (0.11, HALF, "no proven gain", "About 6 pairs would prove it: give a larger --budget, or --pairs 6"),
        (0.3, HALF, "held, but its interval reaches beyond the limit", "About 5 pairs would prove it"),
        (0.08, 0.6, "no proven gain", "The pairs scatter too much"),
    ],
    ids=["hardly a gain", "a loss", "a bound is missed", "more pairs", "one more pair", "scatter"],
)
@pytest.mark.parametrize("slo", ["itl", "throughput"])
def test_what_would_prove_a_gain(slo: str, effect: float, half: float, problem: str, advice: str) -> None:
    name = PRESETS[slo].objective.name
    main = seen(effect if slo == "throughput" else -effect, half=half, figure=name)
    told: Any = SimpleNamespace(change=lambda figure: main, problems=(problem,), pairs=4)
    assert advice in what_would_prove(PRESETS[slo], told)


def test_nothing_would_prove_what_has_no_ratio() -> None:
    told: Any = SimpleNamespace(change=lambda figure: Estimate(figure, 4, 0.0, 1.0), problems=("x",), pairs=4)
    assert what_would_prove(PRESETS["itl"], told) == ""


@pytest.mark.parametrize(
    ("kind", "code"),
    [("better", 0), ("baseline", 0), ("measured", 0), ("infeasible", 1), ("failed", 1), ("interrupted", 130)],
)
def test_exit_codes(kind: Kind, code: int) -> None:
    assert Outcome(kind, "", "").exit_code == code
