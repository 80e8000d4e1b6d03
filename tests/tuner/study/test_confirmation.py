import math
from dataclasses import replace
from typing import Any

import pytest
from analytic_target import AnalyticTarget

from loadgen.compare import compare
from loadgen.measure.estimator import Estimate, estimate
from loadgen.measure.stats import Summary
from loadgen.plan.workload import Length, RequestClass, Workload, preset
from servers.slo.bounds import Bound, name_of
from servers.slo.objective import PRESETS, Slo, parse_slo
from tuner.runs.load import GeneratedLoad, load_seconds
from tuner.runs.result import Measurement, Reading
from tuner.study.confirmation import (
    GUARD_SHARE,
    Confirmation,
    assess,
    assess_pooled,
    compared,
    confidence_of,
    holds,
    looks,
    pairs_for_proof,
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


def test_failed_requests_are_a_problem() -> None:
    confirmation = confirm(PRESETS["itl"], failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert any(
        problem.startswith("failed is 60") or "failed is" in problem for problem in confirmation.problems
    )


def test_where_the_baseline_misses_the_slo_holding_it_is_enough() -> None:
    slo = parse_slo("itl_es99<500ms")
    assert confirm(slo, baseline_feasible=False).confirmed
    missed = confirm(slo, baseline_feasible=False, a=BEST, b=BASELINE)
    assert "ITL ES99 is 1.23 s, the SLO asks for itl_es99 <= 500 ms" in missed.problems[0]


def test_a_baseline_that_missed_the_slo_in_its_trial_alone_is_to_be_beaten() -> None:
    """What failed in its trial was chance: a config that is slower is no remedy."""
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


SCATTERED = [1.3, 0.95, 1.2, 1.1]
"""A gain of 13 % in the mean, whose interval does not exclude a loss."""


def judge(
    slo: Slo,
    b: Any,
    feasible: bool = True,
    before: Any = None,
    after: Any = None,
    confidence: float = 0.95,
) -> Confirmation:
    """Of four pairs, ``b`` by figure: the baseline has 1 throughout. Counts: ``before``, ``after``."""
    names = [name_of(metric, cls) for metric, cls in compared(slo)]
    values = {name: ([1.0] * 4, list(b.get(name, [1.0] * 4))) for name in names}
    counts = {"failed": 0.0}

    def side(given: Any) -> Measurement:
        found = {**dict.fromkeys(names, 1.0), **counts, **(given or {})}
        return Measurement({name: Reading(value, 60) for name, value in found.items()}, 60.0)

    return assess_pooled(values, side(before), side(after), slo, 7, feasible, confidence)


@pytest.mark.parametrize(
    ("values", "confirmed", "hopeless"),
    [
        ([1.06] * 4, True, False),
        ([1.04] * 4, False, True),
        ([0.9] * 4, False, True),
        (SCATTERED, False, False),
    ],
    ids=["a proven gain", "a proven gain that is too small", "a loss", "a gain that is not proven"],
)
def test_a_gain_must_be_both_proven_and_large(values: list[float], confirmed: bool, hopeless: bool) -> None:
    more = judge(PRESETS["throughput"], {"throughput": values})
    less = judge(PRESETS["itl"], {"itl_es99": [1 / value for value in values]})
    assert [(side.confirmed, side.hopeless) for side in (more, less)] == [(confirmed, hopeless)] * 2
    assert (more.settled, more.pairs, more.notes) == (confirmed or hopeless, 4, ())
    assert less.notes == ()


GAIN = {"itl_es99": [0.5, 0.51, 0.5, 0.51]}


@pytest.mark.parametrize(
    ("changes", "hopeless", "problem"),
    [
        ({}, False, ""),
        ({"ttft_es95": [1.25, 1.3, 1.28, 1.27]}, True, "TTFT ES95"),
        ({"ttft_es95": [1.0, 1.4, 1.15, 1.1]}, False, "its interval reaches beyond"),
        ({"throughput": [0.8, 0.82, 0.81, 0.8]}, True, "throughput "),
        ({"throughput": [1.0, 0.8, 0.95, 0.93]}, False, "its interval reaches beyond"),
    ],
    ids=["none", "surely too late", "perhaps too late", "surely too slow", "perhaps too slow"],
)
def test_a_relative_bound_is_hopeless_where_all_of_its_interval_misses_it(
    changes: Any, hopeless: bool, problem: str
) -> None:
    judged = judge(PRESETS["itl"], {**GAIN, **changes})
    assert judged.hopeless == hopeless
    assert judged.confirmed == (not problem)
    assert problem in " ".join(judged.problems)


@pytest.mark.parametrize(
    ("before", "after", "hopeless"),
    [({}, {"failed": 1.0}, True), ({"failed": 1.0}, {"failed": 1.0}, True), ({"failed": 1.0}, {}, False)],
    ids=["the candidate's", "both", "the baseline's"],
)
def test_requests_that_fail_are_hopeless(before: Any, after: Any, hopeless: bool) -> None:
    judged = judge(PRESETS["itl"], GAIN, True, before, after)
    assert judged.hopeless == hopeless
    assert judged.confirmed == (not hopeless)


def test_a_latency_that_is_missed_is_not_hopeless() -> None:
    slo = parse_slo("itl_p99<900ms")
    missed = judge(slo, {"goodput": [1.2] * 4})
    assert (missed.confirmed, missed.hopeless) == (False, False)
    assert judge(slo, {"goodput": [1.2] * 4, "itl_p99": [0.5] * 4}).confirmed


def test_counts_are_those_of_all_runs_together_and_have_no_ratio() -> None:
    failed = judge(
        PRESETS["itl"], {"failed": [1.0, 2.0, 1.0, 1.0]}, before={"failed": 2.0}, after={"failed": 5.0}
    )
    assert failed.change("failed") == Estimate("failed", 4, 2.0, 5.0)


def test_intervals_have_the_confidence_that_is_asked_for() -> None:
    slo, values = parse_slo("itl_p99<1500ms"), {"goodput": [1.2] * 4, "itl_p99": [1.0, 1.1, 1.2, 1.1]}
    names = [name_of(metric, cls) for metric, cls in compared(slo)]
    plain = judge(slo, values)
    assert plain.confirmed
    assert plain.change("itl_p99") == estimate("itl_p99", [1.0] * 4, values["itl_p99"], 0.95)
    given = {name: ([1.0] * 4, values.get(name, [1.0] * 4)) for name in names}
    assert assess_pooled(given, plain.baseline, plain.candidate, slo, 7, True).changes == plain.changes
    wide = judge(slo, values, confidence=0.9999)
    assert wide.change("itl_p99").high > 1.8
    assert "its interval reaches beyond the limit" in wide.problems[0]


def test_a_run_without_the_figure_leaves_it_to_all_runs_together() -> None:
    slo = parse_slo("itl_p99<1500ms")
    assert judge(slo, {"goodput": [1.2] * 4, "itl_p99": [1.0, math.nan, 1.0, 1.0]}).confirmed


def test_a_class_is_compared_by_itself_and_one_that_the_load_lacks_is_not() -> None:
    name = LOAD.workload.classes[0].name
    own = confirm(parse_slo(f"ttft_p95{{class={name}}}<100s"))
    assert 0 < own.change(f"ttft_p95{{class={name}}}").ratio < math.inf
    other = confirm(parse_slo("ttft_p95{class=other}<100s"))
    assert math.isnan(other.change("ttft_p95{class=other}").a)


def test_looks_of_the_largest_confirmation() -> None:
    assert looks(16) == (4, 6, 8, 12, 16)


HALF = 0.1 * 3.182446 / 2
"""Of an interval in logarithms, where four pairs scatter by a tenth (Student's t of 3 degrees: 3.182)."""


def seen(effect: float, pairs: int = 4, half: float = HALF) -> Estimate:
    low, ratio, high = (math.exp(effect + sign * half) for sign in (-1, 0, 1))
    return Estimate("itl_es99", pairs, 1.0, ratio, ratio, low, high, 0.1)


@pytest.mark.parametrize(
    ("effect", "pairs"),
    [(-0.16, 4), (0.16, 4), (-0.13, 5), (-0.11, 6), (-0.1, 7), (-0.02505, 64), (-0.0249, math.inf)],
)
def test_the_pairs_that_would_prove_an_effect_if_they_scatter_alike(effect: float, pairs: float) -> None:
    assert pairs_for_proof(seen(effect), 1.0, 0.95) == pairs
    assert pairs_for_proof(seen(effect + math.log(1.2)), 1.2, 0.95) == pairs


def test_one_pair_or_an_open_interval_says_nothing_of_others() -> None:
    assert pairs_for_proof(seen(-0.5, pairs=1), 1.0, 0.95) == math.inf
    assert pairs_for_proof(Estimate("itl_es99", 4, 1.0, 0.9, 0.9, 0.0, 2.0), 1.0, 0.95) == math.inf
    assert pairs_for_proof(Estimate("itl_es99", 4, 1.0, 0.9, 0.9, 0.5, math.inf), 1.0, 0.95) == math.inf


def test_the_pairs_that_are_needed_are_those_of_the_bound_in_doubt() -> None:
    """The gain is clear after two pairs; that TTFT stays below 1.2 times is not."""
    doubted = judge(PRESETS["itl"], {**GAIN, "ttft_es95": [1.0, 1.3, 1.1, 1.2]})
    assert doubted.problems
    assert not doubted.hopeless
    change = doubted.change("ttft_es95")
    assert doubted.pairs_needed == pairs_for_proof(change, 1.2, 0.95, GUARD_SHARE) > 4
    assert judge(PRESETS["itl"], GAIN).pairs_needed == 2
    absolute = parse_slo("itl_p99<50ms")
    near = judge(absolute, {"goodput": [1.3, 1.31, 1.3, 1.31], "itl_p99": [0.03, 0.055, 0.042, 0.05]})
    assert 4 < near.pairs_needed < math.inf
