"""Repeats where it is close: what is joined, what is asked again, and what a study makes of it."""

import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from analytic_study import SLO, drive, result
from analytic_study import make as make_study
from analytic_target import AnalyticTarget, stall

from servers.slo.objective import Objective
from tuner.runs.result import BASELINE, SERVES, Measurement, Reading, TrialResult
from tuner.search.model import ModelStrategy
from tuner.search.repeats import judge_repeat, merge_repeats
from tuner.search.strategy import History, TpeStrategy, by_measurement
from tuner.search.surrogates import Surrogates
from tuner.space.space import build_space, config_key, effective
from tuner.study.budget import Clock, Plan
from tuner.study.final_trials import FinalTrials
from tuner.study.outcome import describe_trial, without_confirmation
from tuner.workers.coordination import Coordination

OWN = effective({}, "bundled")
SPACE = build_space(OWN, 8192)


def told(
    number: int,
    tokens: int,
    itl: float,
    *,
    ttft: float = 1.0,
    request_set: int = 0,
    spread: float = 0.0,
    violation: float = -0.2,
    status: Any = "measured",
) -> TrialResult:
    readings = {
        "itl_es99": Reading(itl, 100, itl * (1 - spread), itl * (1 + spread)),
        "ttft_es95": Reading(ttft, 100),
        "throughput": Reading(80.0, 100),
        "failed": Reading(0.0, 100),
    }
    measurement = Measurement(readings, 20.0)
    violations = {SERVES: 0.0, "ttft_es95": violation, "failed": 0.0}
    origin = BASELINE if tokens == 2048 and not request_set else "test"
    config = {**OWN, "max_num_batched_tokens": tokens}
    parts: dict[str, Any] = {
        "measurement": measurement,
        "short": measurement,
        "violations": violations,
        "request_set": request_set,
    }
    return TrialResult(number, config, origin, status, **parts)


def overwrite(result: TrialResult, name: str, reading: Reading) -> None:
    readings = result.measurement.readings
    assert isinstance(readings, dict)
    readings[name] = reading


def history(*results: TrialResult) -> History:
    return History(SPACE, SLO.objective, results, bounds=SLO.bounds, relative=SLO.relative)


def test_without_repeats_results_are_what_they_were() -> None:
    results = (told(0, 2048, 0.3), told(1, 512, 0.2))
    assert merge_repeats(results) == results


def test_a_repeat_counts_as_if_it_had_the_draw_that_all_share() -> None:
    """The second draw is harder by half: the baseline says so."""
    own, first = told(0, 2048, 0.30), told(1, 512, 0.20, violation=0.1)
    again, second = told(2, 2048, 0.45, request_set=1), told(3, 512, 0.27, request_set=1, violation=-0.2)
    _, config = merge_repeats((own, first, again, second))
    assert config.number == 1
    assert config.value(SLO.objective) == pytest.approx((0.20 * 0.27 / 1.5) ** 0.5)
    assert config.reading(SLO.objective).n == 200
    assert config.violations["ttft_es95"] == pytest.approx(-0.05)
    assert config.feasible
    assert not first.feasible


def test_the_interval_of_a_repeat_is_put_as_if_it_had_the_draw_that_all_share() -> None:
    own = told(0, 2048, 0.3), told(1, 2048, 0.6, request_set=1)
    parts = told(2, 512, 0.2, spread=0.3), told(3, 512, 0.4, spread=0.3, request_set=1)
    alike = told(2, 512, 0.2, spread=0.3), told(3, 512, 0.2, spread=0.3, request_set=1)
    same = told(0, 2048, 0.3), told(1, 2048, 0.3, request_set=1)
    ours, theirs = (
        merge_repeats((*b, *c))[1].reading(SLO.objective) for b, c in ((own, parts), (same, alike))
    )
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high))


def test_the_baseline_is_known_by_its_origin_wherever_it_stands() -> None:
    """Its repeat is harder by half, the candidate's only as hard: it is better than it looks."""
    own = told(0, 2048, 0.3), told(2, 2048, 0.45, request_set=1)
    parts = told(1, 512, 0.2), told(3, 512, 0.3, request_set=1)
    assert merge_repeats((*parts, *own))[0].value(SLO.objective) == pytest.approx(0.2)


@pytest.mark.parametrize("seen", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1])
def test_a_baseline_without_a_value_says_nothing_of_how_hard_a_draw_is(seen: float, where: int) -> None:
    own = [told(0, 2048, 0.3), told(1, 2048, 0.45, request_set=1)]
    overwrite(own[where], "itl_es99", Reading(seen, 100))
    parts = told(2, 512, 0.2), told(3, 512, 0.3, request_set=1)
    assert merge_repeats((*own, *parts))[1].value(SLO.objective) == pytest.approx((0.2 * 0.3) ** 0.5)


def test_without_the_shared_draw_repeats_stand_as_they_were_measured() -> None:
    """As where the baseline's first trial did not serve."""
    own = [replace(told(n, 2048, 0.3 * n, request_set=n), origin=BASELINE) for n in (1, 2)]
    parts = [told(3, 512, 0.2, request_set=1), told(4, 512, 0.3, request_set=2)]
    assert merge_repeats((*own, *parts))[1].value(SLO.objective) == pytest.approx((0.2 * 0.3) ** 0.5)


def test_of_trials_that_came_to_nothing_the_first_stands_for_the_config() -> None:
    lost = [replace(told(n, 512, 0.2), status="interrupted") for n in (1, 2)]
    assert [r.number for r in merge_repeats((told(0, 2048, 0.3), *lost))] == [0, 1]


def test_a_repeat_is_held_against_the_baseline_under_the_same_requests() -> None:
    repeat, own = told(1, 512, 0.2, ttft=1.5, request_set=1), told(2, 2048, 0.3, request_set=1)
    judged = judge_repeat(repeat, own, SLO.relative)
    assert judged.judged
    assert judged.violations["ttft_es95"] == pytest.approx(1 - 1.2 / 1.5)
    overwrite(own, "ttft_es95", Reading(math.nan))  # then this draw says nothing of that bound
    assert judge_repeat(repeat, own, SLO.relative).violations["ttft_es95"] == -0.2
    assert not judge_repeat(repeat, None, SLO.relative).judged
    failed = replace(repeat, measurement=None, status="failed")
    assert judge_repeat(failed, own, SLO.relative) is failed
    assert judge_repeat(failed, None, SLO.relative) is failed


def test_a_repeat_whose_baseline_has_no_repeat_does_not_count() -> None:
    own, first = told(0, 2048, 0.3), told(1, 512, 0.2)
    assert merge_repeats((own, first, told(2, 512, 0.25, request_set=1))) == (own, first)


def test_two_measurements_together_have_the_smaller_interval() -> None:
    own = told(0, 2048, 0.3), told(3, 2048, 0.3, request_set=1)
    results = *own, told(1, 512, 0.2, spread=0.3), told(2, 512, 0.2, spread=0.3, request_set=1)
    reading = merge_repeats(results)[1].reading(SLO.objective)
    assert 0.2 * 1.3 > reading.high > 0.2 * 1.15
    assert 0.2 * 0.7 < reading.low < 0.2 * 0.85


@pytest.mark.parametrize("ends", [(math.nan, math.nan), (0.0, math.inf)], ids=["no interval", "an open one"])
def test_two_measurements_without_an_interval_have_none_together(ends: Any) -> None:
    """Or a rate, which has none, would be as low as 0 for all that is known, and the worst of all."""
    tokens = {2048: 80.0, 512: 85.0}
    results = [told(k, n, 0.2, request_set=k // 2) for k, n in enumerate([*tokens, *tokens])]
    for each in results:
        rate = Reading(tokens[each.config["max_num_batched_tokens"]], 100, *ends)
        overwrite(each, "throughput", rate)
    own, best = merge_repeats(results)
    reading = best.measurement.reading("throughput")
    assert (str(reading.low), str(reading.high)) == tuple(map(str, ends))
    if math.isnan(ends[0]):
        ranked = by_measurement(replace(history(*results), objective=Objective("throughput", "maximize")))
        assert [r.number for r in ranked] == [best.number, own.number]


@pytest.mark.parametrize(
    ("name", "values", "together"),
    [
        ("goodput", (0.0, 8.0), 0.0),
        ("itl_es99", (0.2, math.inf), math.inf),
        ("itl_es99", (math.nan, 0.2), 0.2),
        ("itl_es99", (0.2, math.nan), 0.2),
    ],
)
def test_of_what_has_no_mean_the_worse_counts(name: str, values: Any, together: Any) -> None:
    runs = [told(k, 2048, 0.3, request_set=k) for k in range(2)]
    for request_set, value in enumerate(values):
        runs.append(told(2 + request_set, 512, 0.2, request_set=request_set))
        overwrite(runs[-1], name, Reading(value, 100))
        overwrite(runs[request_set], name, Reading(1.0, 100))
    assert merge_repeats(runs)[1].measurement.value(name) == pytest.approx(together)


def test_a_count_that_one_of_the_runs_misses_is_missed() -> None:
    first, second = told(1, 512, 0.2), told(2, 512, 0.2, request_set=1)
    second = replace(second, violations={**second.violations, "failed": 3.0})
    assert (
        merge_repeats((told(0, 2048, 0.3), first, told(3, 2048, 0.3, request_set=1), second))[1].violations[
            "failed"
        ]
        == 3.0
    )


def test_a_bound_that_a_repeats_baseline_could_not_set_counts_where_it_was_set() -> None:
    second = told(2, 512, 0.2, request_set=1)
    second = replace(second, violations={SERVES: 0.0, "failed": 0.0})
    own = told(0, 2048, 0.3), told(3, 2048, 0.3, request_set=1)
    joint = merge_repeats((*own, told(1, 512, 0.2, violation=-0.1), second))[1]
    assert joint.violations["ttft_es95"] == -0.1


@pytest.mark.parametrize("request_sets", [(0,), (0, 1)], ids=["measured", "and repeated"])
def test_an_interrupted_trial_does_not_stand_for_what_its_config_measured(
    request_sets: tuple[int, ...],
) -> None:
    """Ctrl-C, the study is resumed, and the config turns out to be close."""
    own = [told(k, 2048, 0.3, request_set=k) for k in range(2)]
    interrupted = TrialResult(2, told(2, 512, 0.2).config, "test", "interrupted", "KeyboardInterrupt")
    again = [told(3 + request_set, 512, 0.2, request_set=request_set) for request_set in request_sets]
    config = merge_repeats([*own, interrupted, *again])[1]
    assert (config.number, config.status, config.value(SLO.objective)) == (3, "measured", pytest.approx(0.2))


def test_what_failed_or_was_stopped_is_not_joined_with_a_measurement() -> None:
    stopped = told(2, 512, 0.9, request_set=1, status="stopped")
    assert merge_repeats((told(0, 2048, 0.3), told(1, 512, 0.2), stopped))[1].value(SLO.objective) == 0.2


@pytest.mark.parametrize(
    ("others", "close"),
    [
        ([(512, 0.20, -0.3), (1024, 0.28, -0.3)], []),
        ([(512, 0.20, -0.3), (1024, 0.21, -0.3)], [512, 1024]),
        ([(512, 0.20, -0.02), (1024, 0.28, -0.3)], [512]),
        ([(512, 0.20, 0.02)], [512]),
        ([(512, 0.20, 0.2)], []),
        ([], []),
    ],
    ids=["clear", "tied", "near its bound", "just beyond its bound", "far beyond", "nothing else"],
)
def test_what_was_measured_says_what_is_close(others: Any, close: Any) -> None:
    results = [told(k, tokens, itl, violation=v) for k, (tokens, itl, v) in enumerate(others, start=1)]
    found = TpeStrategy().close(history(told(0, 2048, 0.3), *results))
    assert [r.config["max_num_batched_tokens"] for r in found] == close


def test_the_model_asks_again_what_may_hold_its_bounds_and_would_be_the_best() -> None:
    """1536 tokens surely hold the bound of 1.2x; 512 are expected to hold it by nothing."""
    ttft = {512: 1.14, 768: 1.10, 1024: 1.05, 1536: 1.02}
    near = [told(k, n, 0.04 + n / 10_000, ttft=slow) for k, (n, slow) in enumerate(ttft.items(), start=1)]
    results = history(told(0, 2048, 0.245), *near)
    model = ModelStrategy()
    chance = model.surrogates(results).log_feasible(model._pools_of(SPACE).of([near[0].config]).x, 0.05)
    assert -3 < chance[0] < -0.05, "the case is a close one"
    found = [r.config["max_num_batched_tokens"] for r in model.close(results)]
    assert 512 in found


def test_the_model_has_nothing_to_ask_where_one_is_best_by_far() -> None:
    results = history(
        told(0, 2048, 0.3), *(told(k, n, n / 5120, ttft=0.6) for k, n in enumerate((1024, 512, 256), 1))
    )
    assert ModelStrategy().close(results) == []


def test_beliefs_take_a_harder_draw_out_of_a_repeat() -> None:
    """All that differs between the draws is that the second is harder by a quarter."""
    shared = [told(0, 2048, 0.30), told(1, 1024, 0.20), told(2, 512, 0.15), told(3, 256, 0.12)]
    again = [told(k + 4, r.config["max_num_batched_tokens"], 1.25 * r.value(SLO.objective), request_set=1)
             for k, r in enumerate((shared[0], shared[2]))]  # fmt: skip
    x = ModelStrategy()._pools_of(SPACE).of([shared[2].config]).x
    before, after = (Surrogates(history(*results)).expected(x)[0][0] for results in (shared, shared + again))
    assert after == pytest.approx(before, abs=0.03)


def test_a_repeat_is_not_counted_as_another_config() -> None:
    results = [
        told(0, 2048, 0.3),
        told(1, 512, 0.4),
        told(2, 2048, 0.3, request_set=1),
        told(3, 512, 0.4, request_set=1),
    ]
    results.append(told(4, 1024, 0.4))
    found = without_confirmation(results, results[0], SPACE, SLO, "over")
    assert "none of 2 other configs" in found.sentence


def test_a_repeat_is_no_duplicate_and_the_same_one_is_queued_once() -> None:
    study = make_study(ModelStrategy(1))
    drive(study, 3)
    config = study.results[1].config
    assert not study.enqueue(config, "again")
    assert study.enqueue(config, "repeat 1", request_set=1)
    assert not study.enqueue(config, "repeat 1", request_set=1)
    assert study.repeating
    proposal = study.propose()
    assert (proposal.config, proposal.request_set) == (config, 1)
    study.tell(proposal, replace(result(proposal), request_set=1))
    assert not study.repeating
    assert study.results[-1].request_set == 1
    assert [config_key(r.config) for r in study.strategy.rank(study.history)].count(config_key(config)) <= 1


def test_what_a_knob_does_is_not_read_off_a_repeat() -> None:
    both = {"max_num_batched_tokens": None, "gpu_memory_utilization": None}
    study = make_study(TpeStrategy(1), fix=["all"], vary=both)
    drive(study, 14)
    before = study.importances()
    study.enqueue(study.results[1].config, "repeat 1", request_set=1)
    proposal = study.propose()
    found = result(proposal)
    slow = replace(found.short, readings={**found.short.readings, "itl_es99": Reading(99.0, 100)})
    study.tell(proposal, replace(found, request_set=1, short=slow))
    assert before
    assert study.importances() == before


def test_a_repeat_that_was_interrupted_is_tried_again_under_its_own_draw() -> None:
    study = make_study(ModelStrategy(1))
    drive(study, 3)
    study.enqueue(study.results[1].config, "repeat 2", request_set=2)
    study.interrupt(study.propose(), "test")
    proposal = study.propose()
    assert (proposal.config, proposal.request_set) == (study.results[1].config, 2)


def test_a_repeat_whose_process_died_is_tried_again_under_its_own_draw() -> None:
    storage = optuna.storages.InMemoryStorage()
    study = make_study(ModelStrategy(1), storage)
    drive(study, 3)
    study.enqueue(study.results[1].config, "repeat 2", request_set=2)
    study.propose()
    assert study.recover() == 1
    assert study.propose().request_set == 2


def test_a_repeat_of_the_baseline_that_kills_the_tuner_twice_is_given_up() -> None:
    storage = optuna.storages.InMemoryStorage()
    study = make_study(ModelStrategy(1), storage)
    drive(study, 1)
    study.enqueue(study.space.baseline, "repeat 1", request_set=1)
    for _ in range(2):
        assert study.propose().request_set == 1
        study.recover()
    assert study.propose().request_set == 0
    (given_up,) = [r for r in study.results if r.request_set]
    assert "died twice" in given_up.reason
    assert study.baseline.status == "measured"


def test_a_baseline_between_the_values_of_the_space_is_repeated_as_it_is() -> None:
    study = make_study(ModelStrategy(1))
    drive(study, 1)
    odd = {**study.space.baseline, "max_num_batched_tokens": 2000}
    study.space = build_space(odd, 8192)
    study.enqueue(odd, "repeat 1", request_set=1)
    assert study.propose().config == odd


def repeats_of(study: Any) -> tuple[Any, Any]:
    """The baseline's and one config's under draw 1, as two workers measure them at the same time."""
    drive(study, 2)
    for told_before in study.results[:2]:
        study.enqueue(told_before.config, "repeat 1", request_set=1)
    return study.propose(), study.propose()


def measured(proposal: Any, ttft: float, violation: float) -> Any:
    """Of a repeat, as a worker tells it: the worker holds it against absolute bounds alone."""
    found = result(proposal)
    readings = {**found.measurement.readings, "ttft_es95": Reading(ttft, 100)}
    violations = {SERVES: 0.0, "failed": violation}
    return replace(found, request_set=1, measurement=Measurement(readings, 20.0), violations=violations)


def test_a_repeat_is_judged_once_its_baseline_is_measured_beside_it() -> None:
    study = make_study(ModelStrategy(1))
    own, config = repeats_of(study)
    study.tell(config, measured(config, ttft=3.0, violation=0.0))
    repeat = study.results[-1]
    assert (repeat.request_set, repeat.judged, repeat.feasible) == (1, False, False)
    assert describe_trial(repeat, SLO.objective).endswith("your config was not measured on these requests")
    assert not [r for r in study.history.results if r.request_set]
    study.tell(own, measured(own, ttft=2.0, violation=0.0))
    repeat = study.results[-1]
    assert repeat.judged
    assert repeat.violations["ttft_es95"] == pytest.approx(1 - 1.2 * 2.0 / 3.0)
    assert [r.request_set for r in study.history.results] == [0, 0, 1, 1]


def test_a_repeat_whose_baseline_fails_is_not_judged_and_no_other_is_launched() -> None:
    study = make_study(ModelStrategy(1))
    own, config = repeats_of(study)
    study.enqueue({**config.config, "max_num_seqs": 64}, "repeat 1", request_set=1)
    study.tell(config, measured(config, ttft=0.1, violation=0.0))
    study.tell(own, TrialResult(own.number, own.config, own.origin, "failed", "died", request_set=1))
    assert study.propose().request_set == 0
    given_up = next(r for r in study.results if r.status == "interrupted")
    assert (given_up.request_set, given_up.reason) == (1, "the baseline failed on these requests: died")
    assert not [r for r in study.history.results if r.request_set and r.status == "measured"]
    assert not study.repeating


def plateau(config: Any, seed: int) -> Any:
    """From 384 tokens down, ITL ES99 differs by hazard alone: by up to a tenth."""
    tokens = config["max_num_batched_tokens"]
    hazard = 0.95 + 0.1 * ((seed * 2654435761 + tokens * 40503) % 1000) / 1000
    return hazard * stall({**config, "max_num_batched_tokens": max(384, tokens)}) / stall(config)


def test_a_search_with_time_left_repeats_what_is_close_beside_the_baseline(make: Any) -> None:
    job = {"trials": 16, "strategy": "tpe", "fix": ("all",), "vary": {"max_num_batched_tokens": None}}
    optimizer = make(AnalyticTarget(itl_factor=plateau), **job)
    optimizer.run()
    results = optimizer.study.results
    own, *repeats = [r for r in results if r.request_set]
    assert not optimizer.study.space.changes(own.config)
    assert own.feasible, "relative bounds are on it, not for it"
    assert not own.violations.keys() & {b.metric for b in optimizer.slo.relative}
    assert 2 <= len(repeats) <= 3
    for repeat in repeats:
        first = next(r for r in results if config_key(r.config) == config_key(repeat.config))
        assert repeat.origin == f"trial {first.number} again, on other requests: it is close"
        assert repeat.value(SLO.objective) != first.value(SLO.objective)
        assert repeat.violations["ttft_es95"] == pytest.approx(
            repeat.measurement.value("ttft_es95") / (1.2 * own.measurement.value("ttft_es95")) - 1
        )


@pytest.mark.parametrize(
    ("budget", "repeated"), [(None, True), (2000.0, True), (700.0, False)], ids=["none", "ample", "short"]
)
def test_time_that_a_confirmation_can_use_is_not_spent_on_repeats(
    budget: float | None, repeated: bool
) -> None:
    study = make_study(TpeStrategy(1), fix=["all"], vary={"max_num_batched_tokens": (1024, 1536)})
    drive(study, 3)
    assert study.propose() is None
    study.strategy.close = lambda history: [r for r in history.results if study.space.changes(r.config)]
    plan = Plan(10.0, 60.0, 30.0, 3, budget, None, 200.0)
    clock = Clock(200.0, lambda: 0.0)
    final_trials = FinalTrials(study, plan, clock)
    assert final_trials.go_on(left=3) == repeated
    assert study.repeating == repeated


class Companion(Coordination):
    """Another worker: it was measuring when this one had no more to do, and then queues repeats."""

    def __init__(self) -> None:
        self.looked = 0

    def settled(self, study: Any) -> bool:
        self.looked += 1
        if self.looked == 1:
            best = next(r for r in study.results if study.space.changes(r.config))
            for again in (study.baseline, best):
                study.enqueue(again.config, "repeat", request_set=1)
            proposal = study.propose()
            found = replace(study.baseline, number=proposal.number, request_set=1, origin="repeat")
            study.tell(proposal, found)
        return True


def test_a_worker_that_waited_for_another_takes_part_in_what_that_has_queued(make: Any) -> None:
    optimizer = make(AnalyticTarget(), trials=3, fix=("all",), vary={"max_num_batched_tokens": (512,)})
    optimizer.coordination = companion = Companion()
    optimizer.search()
    assert [r.request_set for r in optimizer.study.results] == [0, 0, 1, 1]
    assert companion.looked == 2
    assert not optimizer.study.repeating
