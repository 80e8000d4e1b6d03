from pathlib import Path
from typing import Any

import optuna
import pytest
from analytic_target import measure
from optuna.trial import TrialState

from servers.slo.objective import PRESETS
from tuner.runs.result import BASELINE, SERVES, TrialResult
from tuner.search.study import RULE, Study
from tuner.space.space import THRESHOLD, build_space, describe_changes, effective
from tuner.workers.storage import StorageError, open_storage, open_study

SLO = PRESETS["itl"]
DEFAULTS = effective({}, "bundled")


@pytest.fixture
def storage() -> Any:
    return optuna.storages.InMemoryStorage()


def make(storage: Any, baseline: Any = DEFAULTS, **space: Any) -> Study:
    study = open_study(storage, "test", SLO.objective)
    return Study(study, build_space(baseline, 8192, **space), SLO.objective, seed=1)


def result(proposal: Any, status: Any = "measured", bounds: Any = None, **kwargs: Any) -> TrialResult:
    measurement = measure(proposal.config)
    violations = measurement.violations(bounds or ())
    return TrialResult(
        proposal.number,
        proposal.config,
        proposal.origin,
        status,
        measurement=measurement,
        short=measurement,
        violations=violations,
        **kwargs,
    )


def crash(proposal: Any) -> TrialResult:
    return TrialResult(
        proposal.number, proposal.config, proposal.origin, "failed", "exited", violations={SERVES: 1.0}
    )


def drive(study: Study, trials: int, tell: Any = result, **kwargs: Any) -> Any:
    """Propose and tell up to ``trials`` times; returns how many were launched."""
    for launched in range(trials):
        proposal = study.propose()
        if proposal is None:
            return launched
        study.tell(proposal, tell(proposal, **kwargs))
    return trials


def test_the_baseline_is_proposed_first_and_exactly(storage: Any) -> None:
    odd = effective({"max_num_batched_tokens": 777, THRESHOLD: 1000}, "bundled")
    study = make(storage, odd)
    study.enqueue(odd, BASELINE)
    proposal = study.propose()
    assert proposal.config == odd
    assert proposal.origin == BASELINE
    study.tell(proposal, result(proposal))
    assert study.baseline.config == odd


def test_search_finds_a_better_feasible_config(storage: Any) -> None:
    study = make(storage)
    study.enqueue(DEFAULTS, BASELINE)
    bounds = SLO.resolve(measure(DEFAULTS).value)
    drive(study, 40, bounds=bounds)
    best = study.best()
    assert best.measurement.value("itl_es99") < 0.6 * measure(DEFAULTS).value("itl_es99")
    assert all(v <= 0 for v in best.violations.values())


def test_an_infeasible_config_is_never_best(storage: Any) -> None:
    study = make(storage)
    impossible = {"floor": 1.0}
    for _ in range(10):
        proposal = study.propose()
        told = result(proposal)
        study.tell(proposal, TrialResult(**{**vars(told), "violations": impossible}))
    assert study.best() is None


def test_failures_are_told_as_pruned_with_a_violated_constraint_and_no_value(storage: Any) -> None:
    study = make(storage)
    drive(study, 5, tell=crash)
    crashed = [t for t in study.optuna.trials if RULE not in t.constraints]
    assert len(crashed) >= 5
    for trial in crashed:
        assert trial.state == TrialState.PRUNED
        assert trial.constraints == {SERVES: 1.0}
        assert not trial.intermediate_values


def test_the_sampler_leaves_a_region_that_crashes(storage: Any) -> None:
    study = make(storage)

    def crashes(config: Any) -> bool:
        return config["max_num_batched_tokens"] < 512

    drive(study, 60, tell=lambda p: crash(p) if crashes(p.config) else result(p))
    everywhere = [crashes({"max_num_batched_tokens": tokens}) for tokens in study.space.axes[0].values]
    launched = [r for r in study.results if r.status in ("failed", "measured")][20:]
    crashed = sum(r.status == "failed" for r in launched) / len(launched)
    assert crashed < 0.7 * sum(everywhere) / len(everywhere), "though smaller budgets promise a better ITL"


def test_a_trial_stopped_early_reports_its_own_value_and_is_not_best(storage: Any) -> None:
    study = make(storage)
    proposal = study.propose()
    study.tell(proposal, result(proposal, status="stopped"))
    (trial,) = study.optuna.trials
    assert trial.state == TrialState.PRUNED
    assert trial.intermediate_values == {1: pytest.approx(measure(proposal.config).value("itl_es99"))}
    assert study.best() is None


def test_a_small_space_is_tried_once_each_and_then_ends(storage: Any) -> None:
    study = make(storage, fix=["all"], vary={"max_num_seqs": (8, 16, 32), THRESHOLD: (0, 64)})
    launched = drive(study, 1000)
    assert launched == 4 * 2, "3 values and the baseline's, times 2"
    assert study.propose() is None
    keys = [(r.config["max_num_seqs"], r.config[THRESHOLD]) for r in study.results if r.status == "measured"]
    assert len(set(keys)) == len(keys)


def test_all_duplicates_ends_at_once(storage: Any) -> None:
    study = make(storage, fix=["all"], vary={"max_num_seqs": (128,)})
    study.enqueue(DEFAULTS, BASELINE)
    assert drive(study, 1000) == 1
    duplicates = [r for r in study.results if r.status == "duplicate"]
    assert duplicates
    assert all(r.measurement == study.baseline.measurement for r in duplicates)


def test_a_space_that_rules_refuse_whole_ends_without_a_launch(storage: Any) -> None:
    study = make(storage, fix=["all"], vary={"max_num_batched_tokens": (16, 32)})
    study.enqueue(DEFAULTS, BASELINE)
    assert drive(study, 1000) == 1, "only the baseline"
    refused = [r for r in study.results if r.status == "refused"]
    assert refused
    assert all("at least max_num_seqs" in r.reason for r in refused)
    assert {t.state for t in study.optuna.trials if RULE in t.constraints} == {TrialState.PRUNED}


def test_a_duplicate_of_a_crash_is_not_launched_again(storage: Any) -> None:
    study = make(storage, fix=["all"], vary={"max_num_seqs": (8, 16)})
    assert drive(study, 1000, tell=crash) == 3
    assert study.propose() is None


def test_running_trials_of_a_dead_process_are_failed_and_tried_again(storage: Any) -> None:
    first = make(storage)
    lost = first.propose()
    resumed = make(storage)
    assert resumed.recover() == 1
    again = resumed.propose()
    assert again.config == lost.config
    assert again.number != lost.number
    assert storage.get_all_trials(0)[lost.number].state == TrialState.FAIL


def test_a_config_that_kills_the_tuner_twice_is_not_tried_a_third_time(storage: Any) -> None:
    lost = make(storage).propose()
    second = make(storage)
    second.recover()
    assert second.propose().config == lost.config
    third = make(storage)
    third.recover()
    assert third.propose().config != lost.config
    (killer,) = [r for r in third.results if r.status == "failed"]
    assert killer.config == lost.config
    assert "died twice" in killer.reason


def test_an_interrupted_proposal_comes_first_after_the_resume(storage: Any) -> None:
    study = make(storage)
    proposal = study.propose()
    study.interrupt(proposal, "Ctrl-C")
    resumed = make(storage)
    assert resumed.recover() == 0
    assert resumed.propose().config == proposal.config


def test_a_baseline_that_died_is_the_baseline_again(storage: Any) -> None:
    study = make(storage)
    study.enqueue(DEFAULTS, BASELINE)
    study.propose()
    resumed = make(storage)
    resumed.recover()
    again = resumed.propose()
    resumed.tell(again, result(again))
    assert resumed.baseline is not None


def test_a_tie_goes_to_the_config_that_changes_fewer_flags(storage: Any) -> None:
    study = make(storage)
    two = {"max_num_batched_tokens": 128, "max_num_seqs": 32}
    one = {"max_num_batched_tokens": 128}
    for config in (two, one):
        study.enqueue({**DEFAULTS, **config}, "start")
        proposal = study.propose()
        study.tell(proposal, result(proposal))
    by_changes = {len(study.space.changes(r.config)): r.value(SLO.objective) for r in study.results}
    assert by_changes[2] <= by_changes[1] < 1.05 * by_changes[2]
    assert study.space.changes(study.best().config) == {"max_num_batched_tokens": (2048, 128)}


def test_results_survive_the_storage(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    storage = open_storage(url)
    study = make(storage)
    proposal = study.propose()
    told = result(proposal, log_tail="line", seconds={"start": 1.0}, kv_tokens=4096, records=("a.json",))
    study.tell(proposal, told)
    storage.engine.dispose()
    again = open_storage(url)
    (read,) = make(again).results
    assert read == told
    again.engine.dispose()


def test_importances_name_the_knob_that_matters(storage: Any) -> None:
    study = make(storage, fix=["all"], vary={"max_num_batched_tokens": None, "gpu_memory_utilization": None})
    drive(study, 30)
    importances = study.importances()
    assert max(importances, key=importances.get) == "max_num_batched_tokens"


def test_importances_of_too_few_trials_are_empty(storage: Any) -> None:
    assert make(storage).importances() == {}


@pytest.mark.parametrize("url", ["nonsense", "sqlite:////nowhere/at/all.db", "mysql://x/y"])
def test_a_storage_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(StorageError, match="--storage"):
        open_storage(url)


def test_describe_changes() -> None:
    changes = {"max_num_seqs": (16, 12), "speculative_config": ({"method": "ngram"}, None)}
    assert describe_changes(changes) == 'max_num_seqs 16 -> 12, speculative_config {"method": "ngram"} -> off'
