"""Which configs a simulation expects to come through a confirmation."""

import pytest
from analytic_target import AnalyticTarget

from loadgen.workload import preset
from tuner.rehearsal import Fate, Rehearsal
from tuner.runs.load import Load
from tuner.search.prior import SimulatedPrior
from tuner.slo import PRESETS

LOAD = Load(preset("mixed", max_model_len=8192), seed=0, seconds=60.0, rate=1.0)
BASELINE = {"max_num_batched_tokens": 2048}


def rehearsal(asked=(), **target):
    analytic = AnalyticTarget(**target)
    analytic.estimate = "analytic"
    prior = SimulatedPrior(analytic, LOAD, PRESETS["itl"], lambda config: config)
    prior.ask([BASELINE, *({"max_num_batched_tokens": tokens} for tokens in asked)])
    return Rehearsal(prior, LOAD, PRESETS["itl"], BASELINE)


@pytest.mark.parametrize(
    ("tokens", "fate"),
    [(512, Fate.SURE), (2048, Fate.REFUSED), (32, Fate.REFUSED)],
    ids=["better", "no gain", "misses TTFT"],
)
def test_the_fate_of_a_config(tokens, fate):
    assert rehearsal().fate({"max_num_batched_tokens": tokens}) is fate


def test_what_does_not_serve_is_refused():
    starts = rehearsal(failing=lambda config: config["max_num_batched_tokens"] == 512)
    assert starts.fate({"max_num_batched_tokens": 512}) is Fate.REFUSED


def test_the_best_one_that_is_sure():
    assert rehearsal(asked=(32, 512, 1024)).best() == {"max_num_batched_tokens": 512}
    assert rehearsal(asked=(32,)).best() is None
    assert rehearsal().best() is None
