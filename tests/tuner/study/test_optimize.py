"""The whole job against a target that is a formula: how studies end, resume, and what they conclude."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from analytic_target import AnalyticTarget, dies_under_load, does_not_start, stall
from notebook import Notebook

from loadgen.target import StartFailed
from tuner.report.study_result import conclude
from tuner.runs.result import BASELINE
from tuner.study.optimize import MAX_FAILURES
from tuner.study.trial import SetupFailed


def launches(optimizer: Any) -> list[Any]:
    return [r for r in optimizer.study.results if r.status in ("measured", "stopped", "failed")]


def test_a_better_config_is_found_and_confirmed(make: Any) -> None:
    target, notebook = AnalyticTarget(), Notebook()
    optimizer = make(target, notebook)
    outcome = optimizer.run()
    assert outcome.kind == "better"
    assert outcome.exit_code == 0
    assert "max_num_batched_tokens 2048 -> " in outcome.sentence
    assert "confirmed on fresh runs (4 pairs)" in outcome.sentence
    assert "(-95 % [-95, -95])" in outcome.sentence
    assert notebook.phases == ["baseline", "search", "confirmation"]
    assert target.open_now == 0
    first = optimizer.study.results[0]
    assert first.origin == BASELINE
    assert first.kv_tokens == (8000 - 2048 - 1) * 16
    change = outcome.confirmation.change("itl_es99")
    assert change.ratio < 0.8
    assert change.pairs == 4


@pytest.mark.parametrize("slo", ["itl", "stall"])
def test_a_load_that_has_no_such_figure_ends_the_search_at_once(make: Any, tmp_path: Path, slo: str) -> None:
    one = {"classes": [{"name": "one", "weight": 1, "prompt": 500, "output": 1}]}
    (tmp_path / "one.json").write_text(json.dumps(one))
    optimizer = make(AnalyticTarget(), slo=slo, workload=str(tmp_path / "one.json"))
    outcome = optimizer.run()
    assert len(launches(optimizer)) == 1
    assert outcome.sentence.startswith("Your config was compared with none (")
    assert "n/a): this load has no " in outcome.sentence


def test_starting_points_come_right_after_the_baseline(make: Any) -> None:
    optimizer = make(AnalyticTarget(), strategy="tpe")
    optimizer.run()
    assert [r.origin.partition(":")[0] for r in optimizer.study.results[:4]] == [
        BASELINE,
        "start",
        "start",
        "start",
    ]


def test_the_plan_keeps_time_for_the_confirmation(make: Any) -> None:
    notebook = Notebook()
    optimizer = make(AnalyticTarget(), notebook, budget=1000.0, trials=None, run_seconds=20.0)
    optimizer.study = None
    optimizer._search = lambda: "not searched"
    optimizer.run()
    plan = optimizer.plan
    assert plan.confirm_seconds + plan.affordable_trials * plan.trial_seconds <= 1000
    assert plan.pairs == 8
    assert any("reserved for the confirmation (8 pairs of runs)" in note for note in notebook.notes)
    assert any("a start costs 2.0 s" in note for note in notebook.notes)


def test_nothing_beats_a_baseline_that_is_best_already(make: Any) -> None:
    outcome = make(
        AnalyticTarget(), flags={"max_num_batched_tokens": 32, "max_num_seqs": 8}, fix=("max_num_seqs",)
    ).run()
    assert outcome.kind == "baseline"
    assert outcome.exit_code == 0
    assert "No improvement found" in outcome.sentence
    assert outcome.confirmation is None, "nothing was better in the search"


def test_what_does_not_hold_on_fresh_runs_is_refuted(make: Any) -> None:
    """The search's seeds flatter every config but the baseline; fresh seeds do not."""

    def lucky(config: Any, seed: int) -> Any:
        searched = seed < 1000
        lucky = searched and config["max_num_batched_tokens"] != 2048
        return 0.3 if lucky else 2.0 / stall(config)

    outcome = make(AnalyticTarget(itl_factor=lucky)).run()
    assert outcome.kind == "baseline"
    assert outcome.exit_code == 0
    assert outcome.sentence.startswith("Not proven: ")
    assert outcome.confirmation.problems


def test_all_crash(make: Any) -> None:
    notebook = Notebook()
    optimizer = make(AnalyticTarget(start_fault=does_not_start), notebook, trials=100)
    outcome = optimizer.run()
    assert outcome.kind == "failed"
    assert outcome.exit_code == 1
    assert f"nothing served in {MAX_FAILURES} launches" in outcome.ended
    assert "out_of_memory" in outcome.sentence
    assert len(launches(optimizer)) == MAX_FAILURES
    assert all("OutOfMemoryError" in r.log_tail for r in launches(optimizer))


def test_all_die_under_load(make: Any) -> None:
    optimizer = make(AnalyticTarget(run_fault=dies_under_load), trials=100)
    outcome = optimizer.run()
    assert outcome.kind == "failed"
    assert all("died under load: killed" in r.reason for r in launches(optimizer))


def test_a_region_that_crashes_is_survived(make: Any) -> None:
    def oom(config: Any) -> None:
        if config["max_num_batched_tokens"] < 100:
            does_not_start(config)

    optimizer = make(AnalyticTarget(start_fault=oom), trials=15)
    outcome = optimizer.run()
    assert outcome.kind == "better"
    assert outcome.best.config["max_num_batched_tokens"] >= 100


def test_a_baseline_that_does_not_start_does_not_end_the_study(make: Any) -> None:
    def too_large(config: Any) -> None:
        if config["max_num_batched_tokens"] > 1000:
            does_not_start(config)

    optimizer = make(AnalyticTarget(start_fault=too_large))
    outcome = optimizer.run()
    assert optimizer.study.baseline.status == "failed"
    assert outcome.kind == "better"
    assert "Your own config does not serve" in outcome.sentence


def test_a_baseline_that_hangs_as_it_starts_has_cost_its_time(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 1000.0

    def hang(config: Any) -> None:
        nonlocal seconds
        seconds += 120.0
        does_not_start(config)

    target = AnalyticTarget(start_fault=hang)
    monkeypatch.setattr(target, "clock", lambda: seconds)
    optimizer = make(target, trials=1, prior="none")
    optimizer.run()
    assert [r.seconds["total"] for r in launches(optimizer)] == [120.0, 120.0]
    assert optimizer.plan.trial_seconds == 120.0


def test_requests_that_fail_make_a_config_infeasible_with_the_cause(make: Any) -> None:
    target = AnalyticTarget(failing=lambda config: config["max_num_batched_tokens"] < 2048)
    optimizer = make(target, fix=("all",), vary={"max_num_batched_tokens": None})
    outcome = optimizer.run()
    assert outcome.kind == "baseline"
    reasons = {r.reason for r in launches(optimizer) if r.status == "failed"}
    assert any("requests failed" in reason and "500 engine error" in reason for reason in reasons)


def test_zero_feasible(make: Any) -> None:
    optimizer = make(AnalyticTarget(), slo="itl_es99<1ms", trials=8, run_seconds=80.0)
    outcome = optimizer.run()
    assert outcome.kind == "infeasible"
    assert outcome.exit_code == 1
    assert "none of 9 held the SLO" in outcome.sentence
    assert "Closest came" in outcome.sentence
    assert any(r.status == "stopped" and "SLO missed: itl_es99" in r.reason for r in launches(optimizer))


def test_explicit_bounds_that_the_baseline_misses_and_another_config_holds(make: Any) -> None:
    outcome = make(AnalyticTarget(), slo="itl_es99<300ms,ttft_p99<60s", trials=12).run()
    assert outcome.kind == "better"
    assert outcome.confirmation.candidate.value("itl_es99") < 0.3
    assert outcome.confirmation.baseline.value("itl_es99") > 0.3


def test_explicit_bounds_that_the_baseline_holds_leave_nothing_to_gain(make: Any) -> None:
    outcome = make(AnalyticTarget(), slo="itl_es99<30s", trials=6).run()
    assert outcome.kind == "baseline"


def test_all_duplicates(make: Any) -> None:
    optimizer = make(AnalyticTarget(), fix=("all",), vary={"max_num_seqs": (128,)}, trials=100)
    outcome = optimizer.run()
    assert outcome.kind == "baseline"
    assert outcome.ended == "every config of the space was tried"
    assert len(launches(optimizer)) == 1


def test_out_of_reach_trials_are_stopped_early(make: Any) -> None:
    optimizer = make(AnalyticTarget(), trials=25, strategy="random", run_seconds=80.0)
    optimizer.run()
    stopped = [r for r in optimizer.study.results if r.status == "stopped"]
    assert any("out of reach" in r.reason for r in stopped)
    assert all(len(r.records) == 1 for r in stopped), "one rung only"


def test_the_machine_at_fault_ends_the_study_and_a_resume_goes_on(make: Any) -> None:
    launched = itertools.count()

    def disk_full_once(config: Any) -> None:
        if next(launched) == 3:
            raise StartFailed("disk_full", "No space left on device")

    target = AnalyticTarget(start_fault=disk_full_once)
    with pytest.raises(SetupFailed, match="No space left"):
        make(target).run()
    resumed = make(target)
    outcome = resumed.run()
    assert outcome.kind == "better"
    configs = [tuple(sorted((k, str(v)) for k, v in r.config.items())) for r in launches(resumed)]
    assert len(configs) == len(set(configs)), "nothing is measured twice"
    assert [r.status for r in resumed.study.results].count("interrupted") == 1


def test_an_interrupt_keeps_what_is_measured(make: Any) -> None:
    launched = itertools.count()

    def interrupt_once(config: Any) -> None:
        if next(launched) == 4:
            raise KeyboardInterrupt

    target = AnalyticTarget(run_fault=interrupt_once)
    optimizer = make(target)
    with pytest.raises(KeyboardInterrupt):
        optimizer.run()
    assert target.open_now == 0
    outcome = optimizer.interrupted()
    assert outcome.exit_code == 130
    measured = len(launches(optimizer))
    assert measured >= 1
    resumed = make(target)
    assert resumed.run().kind == "better"
    assert target.opened.count({}) == 2, "the baseline was not measured again: once, and once to confirm"


def test_an_interrupt_before_anything_is_measured(make: Any) -> None:
    def interrupt(config: Any) -> None:
        raise KeyboardInterrupt

    optimizer = make(AnalyticTarget(start_fault=interrupt))
    with pytest.raises(KeyboardInterrupt):
        optimizer.run()
    assert "before the baseline" in optimizer.interrupted().sentence


def test_the_rate_is_70_percent_of_the_capacity_found(make: Any) -> None:
    notebook = Notebook()
    optimizer = make(AnalyticTarget(), notebook, rate=None, trials=2)
    optimizer.run()
    profile = optimizer.profile
    assert profile.rate == pytest.approx(0.7 * profile.capacity[-1][2])
    assert optimizer.load.arrival.description.startswith("open loop, Poisson")
    assert any("offered" in note for note in notebook.notes)


def test_the_throughput_preset_is_measured_in_a_closed_loop(make: Any) -> None:
    optimizer = make(AnalyticTarget(), slo="throughput", rate=None, trials=2, run_seconds=10.0)
    optimizer.run()
    assert optimizer.profile.rate is None
    assert optimizer.load.arrival.description.startswith("closed loop")


def test_the_last_trials_ask_whether_every_change_is_needed(make: Any) -> None:
    knobs = {"max_num_batched_tokens": (128, 256), "max_num_seqs": (16,)}
    optimizer = make(AnalyticTarget(), fix=("all",), vary=knobs, trials=4, strategy="tpe")
    outcome = optimizer.run()
    origins = [r.origin for r in optimizer.study.results]
    assert any(origin.startswith("best without") for origin in origins)
    assert list(optimizer.study.space.changes(outcome.best.config)) == ["max_num_batched_tokens"]


def test_only_flags_that_differ_from_the_users_are_given(make: Any) -> None:
    target = AnalyticTarget()
    optimizer = make(target, flags={"max_num_seqs": 64, "dtype": "float32"})
    optimizer.run()
    assert target.opened[0] == {"max_num_seqs": 64, "dtype": "float32"}
    assert all(flags["dtype"] == "float32" for flags in target.opened)
    start = target.opened[1]
    assert set(start) == {"max_num_seqs", "dtype", "max_num_batched_tokens"}


def test_the_tail_sees_stalls_that_fewer_than_one_gap_in_a_hundred_meets(make: Any) -> None:
    """Each of these answers, of 160 to 240 tokens, is stalled once: P99 would be that of a step."""
    job = {"workload": "rag", "fix": ("all",), "vary": {"max_num_seqs": (64, 128)}}
    optimizer = make(AnalyticTarget(stall_every=150), Notebook(), **job)
    optimizer.run()
    baseline = optimizer.study.baseline.measurement
    assert baseline.value("itl_p99") == pytest.approx(0.03, rel=0.1)
    assert baseline.value("itl_es99") > 10 * baseline.value("itl_p99")


@pytest.mark.parametrize(
    ("shares", "told"), [((0.0, 0.1), ""), ((0.05, 0.4), "took 40%"), ((0.5, 0.0), "took 50%")]
)
def test_a_busy_machine_is_in_the_headline(make: Any, shares: tuple[float, float], told: str) -> None:
    optimizer = make(AnalyticTarget(), Notebook(), trials=1)
    seen = iter(shares)
    optimizer.busy_share = lambda: next(seen)
    result = conclude(optimizer, optimizer.run())
    assert ("The machine was busy: other programs " + told in result.lines[0]) == bool(told)
