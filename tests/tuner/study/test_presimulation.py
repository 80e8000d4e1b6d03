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
from tuner.study.presimulation import Forecast, Presimulation, describe_forecasts

LOAD = Load(preset("mixed", max_model_len=8192), seed=0, seconds=60.0, rate=1.0)
BASELINE = {"max_num_batched_tokens": 2048}


def presimulation(
    asked: Any = (), slo: Any = PRESETS["itl"], told: Any = None, **target: Any
) -> Presimulation:
    """``told``: predictions in place of simulated ones, by max_num_batched_tokens."""
    analytic = AnalyticTarget(**target)
    analytic.estimate = "analytic"
    prior = SimulatedPrior(analytic, LOAD, slo, lambda config: config)
    prior.ask([BASELINE, *({"max_num_batched_tokens": tokens} for tokens in asked)])
    for tokens, values in (told or {}).items():
        config = {"max_num_batched_tokens": tokens}
        prior.known[config_key(config)] = Prediction(config, values)
    return Presimulation(prior, LOAD, slo, BASELINE)


@pytest.mark.parametrize(
    ("tokens", "forecast"),
    [(512, Forecast.SURE), (2048, Forecast.REFUSED), (32, Forecast.REFUSED)],
    ids=["better", "no gain", "misses TTFT"],
)
def test_the_forecast_of_a_config(tokens: int, forecast: Any) -> None:
    assert presimulation().forecast({"max_num_batched_tokens": tokens}) is forecast


def test_what_does_not_serve_is_refused() -> None:
    starts = presimulation(failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert starts.forecast({"max_num_batched_tokens": 512}) is Forecast.REFUSED


def test_the_best_one_that_is_sure() -> None:
    assert presimulation(asked=(32, 512, 1024)).best() == {"max_num_batched_tokens": 512}
    assert presimulation(asked=(32,)).best() is None
    assert presimulation().best() is None


def test_predictions_without_a_figure_promise_nothing() -> None:
    assert presimulation(told={512: {"itl_p99": math.inf}, 1024: {"itl_p99": 0.0}}).best() is None


def test_more_is_better_where_the_objective_is_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that promises most is presimulated first."""
    most = presimulation(
        slo=PRESETS["throughput"], told={512: {"throughput": 9.0}, 1024: {"throughput": 90.0}}
    )
    monkeypatch.setattr(most, "forecast", lambda config: Forecast.SURE)
    assert most.best() == {"max_num_batched_tokens": 1024}


def test_what_was_rehearsed_is_known() -> None:
    whole, config = presimulation(), {"max_num_batched_tokens": 512}
    assert whole.known(config) is None
    assert whole.known({**config, "max_num_seqs": 4}) is None
    whole.forecast(config)
    assert whole.known(config) is Forecast.SURE


def test_how_candidates_fared_is_told() -> None:
    forecasts = {7: Forecast.REFUSED, 4: Forecast.REFUSED, 3: Forecast.SURE, 9: Forecast.LIKELY}
    assert describe_forecasts(forecasts).endswith(
        "; sure to hold: trial 3; likely to hold: trial 9; refused: trial 7, 4"
    )
