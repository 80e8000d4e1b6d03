"""Which flag mattered, told from what each knob does alone."""

import math
from typing import Any

import pytest

from tuner.report.curves import KnobCurve, Point
from tuner.report.effects import effects
from tuner.runs.result import Reading


def curve(axis: Any, measured: Any = (), simulated: Any = (), others: Any = ()) -> KnobCurve:
    def points(values: Any) -> tuple[Any, ...]:
        return tuple(Point(str(place), place, Reading(value)) for place, value in enumerate(values))

    return KnobCurve(axis, ("0", "1", "2"), points(measured), points(others), points(simulated))


def test_the_knob_that_moves_the_objective_most_comes_first() -> None:
    found = effects([curve("seqs", simulated=(0.1, 0.2)), curve("tokens", simulated=(0.03, 0.1, 0.24))])
    assert [(e.axis, e.low, e.high, e.values, e.source) for e in found] == [
        ("tokens", 0.03, 0.24, 3, "simulated"),
        ("seqs", 0.1, 0.2, 2, "simulated"),
    ]
    assert [e.share for e in found] == pytest.approx([0.75, 0.25])


def test_one_noisy_trial_of_a_knob_is_no_effect_where_a_simulation_knows_better() -> None:
    (found,) = effects([curve("threshold", measured=(0.03, 0.14), simulated=(0.10, 0.11))])
    assert (found.source, found.high) == ("simulated", 0.11)


def test_what_a_simulation_does_not_see_is_taken_from_trials() -> None:
    (found,) = effects([curve("block_size", measured=(0.1, 0.3), simulated=(0.2, 0.2))])
    assert (found.source, found.low, found.high) == ("measured", 0.1, 0.3)


def test_knobs_that_do_nothing_have_no_share() -> None:
    found = effects([curve("memory", simulated=(0.2, 0.2)), curve("seqs", simulated=(0.2, 0.2))])
    assert [e.share for e in found] == [0.0, 0.0]


def test_trials_that_changed_other_knobs_too_and_what_never_ended_say_nothing() -> None:
    assert effects([curve("seqs", measured=(0.1, math.inf), others=(0.1, 0.9), simulated=(0.2,))]) == []
