"""Which configs a simulation expects to come through a confirmation."""

import math
from typing import Any

import pytest
from analytic_target import AnalyticTarget

from loadgen.plan.workload import preset
from servers.slo.objective import PRESETS
from tuner.runs.load import Load
from tuner.search.prior import Prediction, SimulatedPrior
from tuner.space.config import config_key
from tuner.study.presimulation import Fate, Rehearsal, describe_fates

LOAD = Load(preset("mixed", max_model_len=8192), seed=0, seconds=60.0, rate=1.0)
BASELINE = {"max_num_batched_tokens": 2048}


def rehearsal(asked: Any = (), slo: Any = PRESETS["itl"], told: Any = None, **target: Any) -> Rehearsal:
    """``told``: predictions in place of simulated ones, by max_num_batched_tokens."""
    analytic = AnalyticTarget(**target)
    analytic.estimate = "analytic"
    prior = SimulatedPrior(analytic, LOAD, slo, lambda config: config)
    prior.ask([BASELINE, *({"max_num_batched_tokens": tokens} for tokens in asked)])
    for tokens, values in (told or {}).items():
        config = {"max_num_batched_tokens": tokens}
        prior.known[config_key(config)] = Prediction(config, values)
    return Rehearsal(prior, LOAD, slo, BASELINE)


@pytest.mark.parametrize(
    ("tokens", "fate"),
    [(512, Fate.SURE), (2048, Fate.REFUSED), (32, Fate.REFUSED)],
    ids=["better", "no gain", "misses TTFT"],
)
def test_the_fate_of_a_config(tokens: int, fate: Any) -> None:
    assert rehearsal().fate({"max_num_batched_tokens": tokens}) is fate


def test_what_does_not_serve_is_refused() -> None:
    starts = rehearsal(failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert starts.fate({"max_num_batched_tokens": 512}) is Fate.REFUSED


def test_the_best_one_that_is_sure() -> None:
    assert rehearsal(asked=(32, 512, 1024)).best() == {"max_num_batched_tokens": 512}
    assert rehearsal(asked=(32,)).best() is None
    assert rehearsal().best() is None


def test_predictions_without_a_figure_promise_nothing() -> None:
    assert rehearsal(told={512: {"itl_p99": math.inf}, 1024: {"itl_p99": 0.0}}).best() is None


def test_more_is_better_where_the_objective_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that promises most is rehearsed first."""
    most = rehearsal(slo=PRESETS["throughput"], told={512: {"throughput": 9.0}, 1024: {"throughput": 90.0}})
    monkeypatch.setattr(most, "fate", lambda config: Fate.SURE)
    assert most.best() == {"max_num_batched_tokens": 1024}


def test_what_was_rehearsed_is_known() -> None:
    whole, config = rehearsal(), {"max_num_batched_tokens": 512}
    assert whole.known(config) is None
    assert whole.known({**config, "max_num_seqs": 4}) is None
    whole.fate(config)
    assert whole.known(config) is Fate.SURE


def test_how_candidates_fared_is_told() -> None:
    fates = {7: Fate.REFUSED, 4: Fate.REFUSED, 3: Fate.SURE, 9: Fate.LIKELY}
    assert describe_fates(fates).endswith(
        "; sure to hold: trial 3; likely to hold: trial 9; refused: trial 7, 4"
    )
