import math
from dataclasses import replace
from typing import Any

import pytest
from analytic_target import AnalyticTarget

from loadgen.compare import compare
from loadgen.measure.estimator import Estimate
from loadgen.measure.stats import Summary
from loadgen.plan.workload import Length, RequestClass, Workload, preset
from servers.slo.bounds import Bound, name_of
from servers.slo.objective import PRESETS, Slo, parse_slo
from tuner.runs.load import GeneratedLoad, load_seconds
from tuner.runs.result import Measurement, Reading
from tuner.study.confirmation import (
    GUARD_SHARE,
    assess,
    assess_pooled,
    compared,
    confidence_of,
    holds,
    looks,
    words,
)

LOAD = GeneratedLoad(preset("mixed", max_model_len=8192), seed=0, seconds=60.0, rate=1.0)
BASELINE, BEST = {"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 512}


def confirm(
    slo: Slo,
    pairs: int = 3,
    baseline_feasible: bool = True,
    a: Any = BASELINE,
    b: Any = BEST,
    load: Any = LOAD,
    **target: Any,
) -> Any:
    seeds = load.confirmation_seeds(pairs)
    comparison = compare(AnalyticTarget(**target), a, b, load.confirmation, seeds=seeds, metrics=[])
    seconds = {seed: load_seconds(load.confirmation(seed)) for seed in seeds}
    return assess(comparison, slo, seconds, 7, baseline_feasible)


def test_a_gain_is_confirmed_with_its_interval() -> None:
    confirmation = confirm(PRESETS["itl"])
    assert confirmation.confirmed
    assert confirmation.pairs == 3
    assert confirmation.trial == 7
    itl = confirmation.change("itl_es99")
    assert itl.ratio == pytest.approx(0.3322 / 1.225, rel=1e-3)
    assert itl.low <= itl.ratio <= itl.high
    assert words(itl).endswith("(-73 % [-73, -73])")


def test_a_config_is_not_better_than_itself() -> None:
    confirmation = confirm(PRESETS["itl"], b=BASELINE)
    assert not confirmation.confirmed
    assert "no gain of 5 % or more is proven" in confirmation.problems[0]


def test_noise_is_no_gain() -> None:
    noise = {0: 1.3, 1: 0.8, 2: 1.1}
    confirmation = confirm(
        PRESETS["itl"],
        b={"max_num_batched_tokens": 2000},
        itl_factor=lambda config, seed: noise[seed % 10] if config["max_num_batched_tokens"] == 2000 else 1.0,
    )
    assert any("no gain of 5 % or more is proven" in problem for problem in confirmation.problems)


def test_a_relative_bound_is_judged_on_the_pairs() -> None:
    confirmation = confirm(PRESETS["itl"], b={"max_num_batched_tokens": 32})
    assert any(problem.startswith("TTFT ES95") and "1.2x" in problem for problem in confirmation.problems)


def test_a_bound_on_what_the_load_does_not_have_is_none() -> None:
    """A request of one token has no gap between tokens."""
    one = Workload("one", (RequestClass("one", 1, Length(2000), Length(1)),))
    confirmation = confirm(
        PRESETS["ttft"], a={"max_num_batched_tokens": 512}, b={}, load=replace(LOAD, workload=one)
    )
    assert math.isnan(confirmation.change("itl_es99").a)
    assert confirmation.problems == ()
    assert confirmation.surely_holds(PRESETS["ttft"].relative)


def test_failed_requests_are_a_problem() -> None:
    confirmation = confirm(PRESETS["itl"], failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert any(
        problem.startswith("failed is 60") or "failed is" in problem for problem in confirmation.problems
    )


@pytest.mark.parametrize(
    ("before", "after", "feasible", "missed"),
    [
        (8.5, 8.5, True, False),
        (8.5, 6.0, True, False),
        (8.5, 9.0, True, True),
        (0.0, 3.0, True, True),
        (8.5, 8.5, False, True),
    ],
    ids=["as much", "less", "more", "its own", "the baseline had one in its trial"],
)
def test_a_backlog_that_the_loads_leave_the_baseline_too_is_not_the_candidates(
    before: float, after: float, feasible: bool, missed: bool
) -> None:
    known = confirm(PRESETS["itl"])

    def measured(measurement: Measurement, backlog: float) -> Measurement:
        return replace(measurement, readings={**measurement.readings, "backlog": Reading(backlog, 60)})

    values = {name_of(metric, cls): ([1.0] * 4, [1.0] * 4) for metric, cls in compared(PRESETS["itl"])}
    values["itl_es99"] = ([1.0, 1.01] * 2, [0.25, 0.26] * 2)
    sides = measured(known.baseline, before), measured(known.candidate, after)
    judged = assess_pooled(values, *sides, PRESETS["itl"], 7, feasible)
    assert any(problem.startswith("backlog is") for problem in judged.problems) == missed
    assert any("backlog with both" in note for note in judged.notes) == (not missed)


def test_where_the_baseline_misses_the_slo_holding_it_is_enough() -> None:
    slo = parse_slo("itl_es99<500ms")
    assert confirm(slo, baseline_feasible=False).confirmed
    missed = confirm(slo, baseline_feasible=False, a=BEST, b=BASELINE)
    assert "ITL ES99 is 1.23 s, the SLO asks for itl_es99 <= 500 ms" in missed.problems[0]


def test_a_baseline_that_missed_the_slo_in_its_trial_alone_is_to_be_beaten() -> None:
    """Its trial's backlog was the draw of the requests: a config that is slower is no remedy."""
    worse = confirm(PRESETS["itl"], baseline_feasible=False, a=BEST, b={"max_num_batched_tokens": 768})
    assert not worse.confirmed
    assert any("no gain of 5 % or more is proven" in problem for problem in worse.problems)
    assert confirm(PRESETS["itl"], baseline_feasible=False).confirmed


def test_a_bound_that_is_only_just_held_is_not_held() -> None:
    noise = {0: 0.9, 1: 1.0, 2: 1.1}

    def held(slo: str) -> Any:
        return confirm(
            parse_slo(slo), baseline_feasible=False, itl_factor=lambda config, seed: noise[seed % 10]
        )

    assert held("itl_es99<500ms").confirmed
    assert "held, but its interval reaches beyond the limit" in held("itl_es99<360ms").problems[0]
    assert "missed" in held("itl_es99<330ms").problems[0]


def test_each_run_is_summarised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured together, without each in turn and run by run for the percentiles' intervals."""
    seeds = LOAD.confirmation_seeds(3)
    comparison = compare(AnalyticTarget(), BASELINE, BEST, LOAD.confirmation, seeds=seeds, metrics=[])
    made = []

    def summarised(records: Any, bounds: Any = ()) -> Summary:
        made.append(bounds)
        return Summary(records, bounds)

    monkeypatch.setattr("tuner.runs.measure.Summary", summarised)
    assert assess(comparison, PRESETS["itl"], dict.fromkeys(seeds, 60.0), 7, True).pairs == 3
    assert len(made) == 6


def test_changes_without_a_ratio_say_so() -> None:
    assert words(Estimate("failed", 4, 0, 3)) == "0 -> 3 (n/a)"
    assert words(Estimate("itl_es99", 4, 1.0, 0.5, 0.5, 0.4, 0.625)) == "1 s -> 500 ms (-50 % [-60, -38])"


def test_looks_share_the_chance_of_an_error() -> None:
    assert looks(3) == (3,)
    assert looks(4) == (4,)
    assert looks(9) == (4, 6, 8, 9)
    assert confidence_of(4) == pytest.approx(0.95)
    assert confidence_of(9) == pytest.approx(1 - 0.05 / 4)


def test_a_confirmation_is_settled_when_proven_or_hopeless() -> None:
    assert confirm(PRESETS["itl"]).settled
    slower = confirm(PRESETS["itl"], a=BEST, b=BASELINE)
    assert (slower.confirmed, slower.hopeless) == (False, True)
    noise = {0: 1.3, 1: 0.8, 2: 1.1}
    unclear = confirm(
        PRESETS["itl"],
        b={"max_num_batched_tokens": 2000},
        itl_factor=lambda config, seed: noise[seed % 10] if config["max_num_batched_tokens"] == 2000 else 1.0,
    )
    assert not unclear.settled
    failing = confirm(PRESETS["itl"], failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert failing.hopeless


@pytest.mark.parametrize(
    ("interval", "near", "all_of_it"),
    [
        ((0.9, 1.15), True, True),
        ((0.9, 1.25), True, False),
        ((0.9, 2.0), False, False),
        ((0.0, math.inf), False, False),
        ((math.nan, math.nan), True, True),
    ],
    ids=["wholly", "its near part", "hardly", "open", "none"],
)
def test_a_bound_is_held_so_far_towards_the_worse_end(
    interval: tuple[float, float], near: bool, all_of_it: bool
) -> None:
    bound = Bound("ttft_es95", "<=", 1.2)
    assert holds(bound, 1.0, *interval, GUARD_SHARE) == near
    assert holds(bound, 1.0, *interval, 1.0) == all_of_it
    low, high = (1 / end if end else math.inf for end in reversed(interval))
    assert holds(Bound("throughput", ">=", 1 / 1.2), 1.0, low, high, GUARD_SHARE) == near
