"""The search's own strategy: when it ends, and what it leaves for the confirmation."""

import random
from typing import Any

import pytest
from analytic_study import BOUNDS, SLO, drive, make, result
from analytic_target import measure

from tuner.runs.result import BASELINE, Measurement, Reading, TrialResult
from tuner.search.model import STOP_LOG_GAIN, STOP_PROPOSALS, ModelStrategy
from tuner.search.prior import Prediction, Prior
from tuner.search.strategy import EXPECTED_GAIN, History
from tuner.space.config import Config
from tuner.space.space import build_space, config_key, effective

DEFAULTS = effective({}, "bundled")
SPACE = build_space(DEFAULTS, 8192)


def test_it_ends_where_nothing_is_to_be_gained_and_has_found_the_best_by_then() -> None:
    study = make(ModelStrategy(1))
    told = drive(study, 60)
    assert study.propose() is None
    assert len(told) < 40
    assert "expected to gain more than" in study.strategy.exhausted
    best = study.best().value(SLO.objective)
    launchable = [c for c in study.space.sample(random.Random(0), 4096) if not study.space.refusals(c)]
    measured = [measure(config) for config in launchable]
    held = [m for m in measured if all(v <= 0 for v in m.violations(BOUNDS).values())]
    assert best < 1.05 * min(m.value("itl_es99") for m in held)


def test_a_search_in_which_only_idle_changes_are_left_says_so() -> None:
    space = build_space(DEFAULTS, 8192, fix=("all",), vary={"gpu_memory_utilization": None})
    readings = {"itl_es99": Reading(0.1, 100)}
    seen: dict[str, Any] = {"peak_kv_usage": 0.1, "preemptions": 0, "prefix_hits": 0, "peak_running": 8}
    own = TrialResult(0, space.baseline, BASELINE, "measured", measurement=Measurement(readings, 9.0), **seen)
    strategy = ModelStrategy()
    history = History(space, SLO.objective, (own,), taken=frozenset({config_key(space.baseline)}))
    assert strategy.propose(history) is None
    assert (
        strategy.exhausted
        == "the configs that are left change the KV pool or the sequence slots, which are never short"
    )


def after(*gains: Any) -> History:
    """A history whose proposals promised these gains; None: not one of the model's."""
    told = [
        TrialResult(k, DEFAULTS, "test", "stopped", expected={} if gain is None else {EXPECTED_GAIN: gain})
        for k, gain in enumerate(gains)
    ]
    return History(SPACE, SLO.objective, tuple(told))


@pytest.mark.parametrize(
    ("gains", "now", "over"),
    [
        ([], STOP_LOG_GAIN / 2, False),
        ([STOP_LOG_GAIN / 2] * (STOP_PROPOSALS - 1), STOP_LOG_GAIN / 2, True),
        ([STOP_LOG_GAIN / 2] * (STOP_PROPOSALS - 1), STOP_LOG_GAIN * 2, False),
        ([STOP_LOG_GAIN / 2, STOP_LOG_GAIN * 2], STOP_LOG_GAIN / 2, False),
        ([STOP_LOG_GAIN / 2, None, STOP_LOG_GAIN / 2, None], STOP_LOG_GAIN / 2, True),
    ],
)
def test_one_proposal_that_promises_little_is_not_the_end(gains: Any, now: Any, over: bool) -> None:
    assert ModelStrategy()._over(after(*gains), now) == over


def test_it_does_not_end_while_nothing_holds_the_slo() -> None:
    study = make(ModelStrategy(1))
    study.bounds = ()
    for _ in range(8):
        proposal = study.propose()
        assert proposal is not None
        told = result(proposal)
        missed = {**told.violations, "throughput": 0.5}
        study.tell(proposal, TrialResult(**{**vars(told), "violations": missed}))
    assert all(EXPECTED_GAIN not in r.expected for r in study.results)


def told(number: int, tokens: int, cost: float = 0.3) -> TrialResult:
    """Small budgets have the better ITL, and cost TTFT."""
    values = {"itl_es99": tokens / 2048, "ttft_es95": (2048 / tokens) ** cost, "throughput": 75.0}
    measured = Measurement({name: Reading(value, 1000) for name, value in values.items()}, 20.0)
    origin = "baseline" if tokens == 2048 else "test"
    config = {**DEFAULTS, "max_num_batched_tokens": tokens}
    return TrialResult(number, config, origin, "measured", measurement=measured, short=measured)


def test_a_change_that_seems_to_do_nothing_is_left_out() -> None:
    """The formula knows neither memory nor drafts."""
    study = make(ModelStrategy(1))
    drive(study, 12)
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    inactive = {"gpu_memory_utilization": 0.8, "speculative_config": drafts}
    assert study.enqueue({**study.space.baseline, "long_prefill_token_threshold": 256, **inactive}, "test")
    [*_, measured] = drive(study, 1)
    simpler = study.without_inactive(measured.config)
    assert study.space.changes(simpler).keys() == {"long_prefill_token_threshold"}
    assert study.without_inactive(simpler) == simpler


def test_a_simulation_never_outranks_what_was_measured() -> None:
    """The prior is sure that 2,048 tokens are best and 128 serve nothing; the trials say the opposite."""

    class Wrong(Prior):
        def predict(self, config: Config) -> Prediction:
            if config["max_num_batched_tokens"] <= 128:
                return Prediction(config, failure="out_of_memory: for all that is simulated")
            return Prediction(config, {"itl_es99": 1.0 / config["max_num_batched_tokens"], "throughput": 1e3})

    space = build_space(DEFAULTS, 8192, fix=["all"], vary={"max_num_batched_tokens": (128, 512, 2048)})
    results = tuple(told(k, tokens, cost=0.0) for k, tokens in enumerate((2048, 512, 128)))
    history = History(space, SLO.objective, results, bounds=SLO.bounds, relative=SLO.relative)
    prior = Wrong()
    strategy = ModelStrategy(prior=prior)
    prior.ask(r.config for r in results)
    assert strategy.rank(history)[0].config["max_num_batched_tokens"] == 128
