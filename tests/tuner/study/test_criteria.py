"""Which bounds a trial is held against, and what it is compared with."""

from dataclasses import replace

import pytest

from servers.slo.bounds import Bound
from servers.slo.objective import NO_FAILURE, PRESETS
from tuner.runs.result import BASELINE, Measurement, Reading, TrialResult
from tuner.study.criteria import Criteria

SLO = PRESETS["itl"]


def measured(ttft: float, throughput: float = 10.0) -> Measurement:
    return Measurement({"ttft_es95": Reading(ttft), "throughput": Reading(throughput)}, 10.0)


OWN = TrialResult(0, {}, BASELINE, "measured", measurement=measured(1.0), short=measured(2.0))
BEST = TrialResult(1, {}, "test", "measured", measurement=measured(0.5), short=measured(0.4))


def limits(bounds: tuple[Bound, ...]) -> dict[str, float]:
    return {bound.name: bound.limit for bound in bounds if bound != NO_FAILURE}


def test_bounds_are_relative_to_the_whole_baseline_and_short_ones_to_the_worse_of_both() -> None:
    criteria = Criteria.of(SLO, OWN, BEST)
    assert limits(criteria.bounds) == pytest.approx({"ttft_es95": 1.2, "throughput": 9.0})
    assert limits(criteria.short_bounds) == pytest.approx({"ttft_es95": 2.4, "throughput": 9.0})
    assert (criteria.incumbent, criteria.incumbent_whole) == (BEST.short, BEST.measurement)
    slow = Criteria.of(SLO, replace(OWN, short=measured(0.5)), None)
    assert limits(slow.short_bounds)["ttft_es95"] == pytest.approx(1.2)
    assert (slow.incumbent, slow.incumbent_whole) == (None, None)


def test_the_baseline_itself_and_repeats_are_measured_in_full() -> None:
    for criteria in (Criteria.of(SLO, None, None), Criteria.of(SLO, OWN, BEST, repeated=True)):
        assert (criteria.bounds, criteria.short_bounds, criteria.incumbent) == ((NO_FAILURE,), (), None)


@pytest.mark.parametrize("missing", ["measurement", "short"])
def test_a_baseline_that_was_not_measured_sets_no_relative_bound(missing: str) -> None:
    criteria = Criteria.of(SLO, replace(OWN, **{missing: None}), BEST)
    assert (criteria.bounds, criteria.short_bounds, criteria.incumbent) == (
        (NO_FAILURE,),
        (NO_FAILURE,),
        None,
    )
