"""A server fitted to what its baseline measured: on simulated servers, whose step times are known."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from analytic_target import AnalyticTarget
from llama_8b import CONFIG
from notebook import Notebook

from engine.sim.step_times import StepTimes
from loadgen.plan.workload import Length, RequestClass, Workload
from loadgen.sim.model_shape import Shape, shape_of
from loadgen.target import Target
from loadgen.targets.simulated import SimulatedTarget
from servers.kinds import VLLM
from servers.slo.objective import parse_slo
from servers.start_log import read_start_log
from tuner.command import run
from tuner.job.job import Job
from tuner.job.options import Options, Place
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import GeneratedLoad, load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.profiling import Profile, time_alone
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.search import fitted_simulator as fitted_module
from tuner.search.fitted_simulator import CannotFit, FittedSimulator, fit_simulator
from tuner.search.prior import PriorError, SimulatedPrior, make_simulator
from tuner.space.knobs import started_with
from tuner.space.space import effective
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench

SLO = parse_slo("itl_es99<50ms,ttft_es95<1s")
TIMES = StepTimes(launch=4e-3, weights=9e-3, per_token=1e-4, per_row=3e-5, per_context=8e-8, per_pair=5e-9)
FLAGS = {"max_num_batched_tokens": 1024, "max_num_seqs": 64, "max_model_len": 4096}
CLASSES = (
    RequestClass("chat", 3, Length(300, 0.5), Length(40, 0.5)),
    RequestClass("rag", 1, Length(1600), Length(60)),
)
LOAD = GeneratedLoad(Workload("made up", CLASSES), seed=0, seconds=8.0, rate=5.0)


def simulated(folder: Path) -> SimulatedTarget:
    """A server that steps by TIMES, with the memory of an 8B model."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "times.json").write_text(TIMES.to_json())
    return SimulatedTarget(f"simulated:{folder / 'times.json'}", str(folder / "config.json"))


def measured(target: Target, flags: Mapping[str, Any]) -> Measurement:
    with target.open(flags) as server:
        return measure([Run(server.run(schedule), load_seconds(schedule)) for schedule in LOAD.rungs()], SLO)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> SimulatedTarget:
    return simulated(tmp_path_factory.mktemp("truth"))


@pytest.fixture(scope="module")
def profile(truth: SimulatedTarget) -> Profile:
    with truth.open(FLAGS) as server:
        alone = time_alone(server, 4096, 0, lambda to, load: to.run(load))
        told = read_start_log(server.log_tail(), VLLM, FLAGS, started_with("vllm"), proportional=True)
    assert told.memory is not None
    return Profile(
        4096, 40.0, alone.prefill_speed, rate=5.0, lone_itl=alone.itl, memory=told.memory.to_json()
    )


@pytest.fixture(scope="module")
def baseline(truth: SimulatedTarget) -> TrialResult:
    config = effective(FLAGS, "vllm")
    found = measured(truth, FLAGS)
    return TrialResult(0, config, "baseline", "measured", measurement=found, peak_running=12)


@pytest.fixture(scope="module")
def fitted(profile: Profile, baseline: TrialResult) -> FittedSimulator:
    return fit_simulator(profile, baseline, LOAD.rungs(), SLO)


def test_the_baseline_that_it_was_fitted_to_is_reproduced(fitted: FittedSimulator) -> None:
    assert {"itl_p50", "itl_es99", "ttft_es95", "throughput"} < fitted.errors.keys()
    assert max(map(abs, fitted.errors.values())) < 0.1
    assert fitted.coefficients["per_token"] == pytest.approx(TIMES.per_token, rel=0.15)
    assert "ms per prompt token" in fitted.describe()
    assert "its own ITL ES99 is off by" in fitted.describe()


def test_figures_that_contradict_each_other_send_no_coefficient_far_away(
    profile: Profile, baseline: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lone request that was slow and quick prefills, of a server whose tail is a hundred times its median:
    steps of days would be simulated second by second.
    """
    tried: list[dict[str, float]] = []
    make = fitted_module._Fit.fitted

    def noted(fit: fitted_module._Fit, free: dict[str, float]) -> FittedSimulator:
        tried.append(free)
        return make(fit, free)

    monkeypatch.setattr(fitted_module._Fit, "fitted", noted)
    assert baseline.measurement is not None
    readings = dict(baseline.measurement.readings)
    for name in ("itl_p95", "itl_es99"):
        if name in readings:
            readings[name] = replace(readings[name], value=100 * readings["itl_p50"].value)
    odd = replace(baseline, measurement=replace(baseline.measurement, readings=readings))
    fit_simulator(
        replace(profile, lone_itl=3 * profile.lone_itl, prefill_speed=28 * profile.prefill_speed),
        odd,
        LOAD.rungs(),
        SLO,
    )
    assert len(tried) > 10
    for free in tried:
        for name, value in free.items():
            assert 1 / 30 < value / tried[0][name] < 30, name


@pytest.mark.parametrize("change", [{"max_num_batched_tokens": 256}, {"long_prefill_token_threshold": 128}])
def test_it_predicts_configs_that_were_not_measured(
    fitted: FittedSimulator, truth: SimulatedTarget, change: dict[str, int]
) -> None:
    own, other = (measured(truth, {**FLAGS, **more}) for more in ({}, change))
    predicted = measured(fitted.target, {**FLAGS, **change})
    assert other.value("itl_es99") < 0.7 * own.value("itl_es99"), "or there is nothing to predict"
    for name in ("itl_p50", "itl_es99", "ttft_p50", "ttft_es95"):
        assert predicted.value(name) == pytest.approx(other.value(name), rel=0.15), name


def test_it_is_flat_in_flags_whose_effect_was_not_measured(fitted: FittedSimulator) -> None:
    prior = SimulatedPrior(fitted.target, LOAD, SLO, lambda config: config)
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    unknown: tuple[dict[str, Any], ...] = (
        {},
        {"kv_cache_dtype": "fp8"},
        {"speculative_config": drafts},
        {"cudagraph_capture_sizes": [1]},
    )
    own, *others = (prior.predict({**fitted.baseline, **more}) for more in unknown)
    assert own.values["itl_es99"] > 0
    assert [other.values for other in others] == [own.values] * 3


def test_the_pool_goes_with_the_memory_where_the_start_log_tells(fitted: FittedSimulator) -> None:
    def tokens(fitted: FittedSimulator, share: float) -> int:
        with fitted.target.open({"gpu_memory_utilization": share}) as server:
            return server.simulation.config.num_gpu_blocks_override * 16

    assert tokens(fitted, 0.92) == pytest.approx(fitted.kv_tokens, abs=32)
    assert tokens(fitted, 0.75) < 0.8 * tokens(fitted, 0.92)
    unknown = replace(fitted, memory=None)
    assert tokens(unknown, 0.75) == tokens(unknown, 0.92)
    assert "the same KV pool" in unknown.describe()


def test_a_fit_without_memory_plan_or_lone_request(
    profile: Profile, baseline: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old study, or a server that logs nothing."""
    monkeypatch.setattr("tuner.search.fitted_simulator.MAX_EVALUATIONS", 3)
    blind = replace(profile, memory=None, lone_itl=math.nan)
    fitted = fit_simulator(blind, replace(baseline, peak_running=None), LOAD.rungs(), SLO, Shape(4e-5, 9e-6))
    assert fitted.coefficients["per_pair"] == pytest.approx(4e-5 * fitted.coefficients["per_token"])
    assert max(abs(fitted.errors[name]) for name in ("itl_p50", "itl_es99", "ttft_es95")) < 0.1
    assert fitted.memory is None


def test_of_what_never_came_nothing_is_reproduced(
    profile: Profile, baseline: TrialResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of the baseline's requests failed: their latency is infinite, and so is the tail."""
    monkeypatch.setattr("tuner.search.fitted_simulator.MAX_EVALUATIONS", 1)
    assert baseline.measurement is not None
    readings = {**baseline.measurement.readings, "ttft_es95": Reading(math.inf, 40)}
    broken = replace(baseline, measurement=replace(baseline.measurement, readings=readings))
    fitted = fit_simulator(replace(profile, lone_itl=math.inf), broken, LOAD.rungs(), SLO)
    assert {"ttft_es95", "itl alone"}.isdisjoint(fitted.errors)
    assert all(map(math.isfinite, fitted.errors.values()))


def test_a_pool_that_nobody_fills_is_laid_out_no_larger(fitted: FittedSimulator) -> None:
    endless = replace(fitted, kv_tokens=10**12)
    with endless.target.open({"gpu_memory_utilization": 0.5}) as server:
        assert server.simulation.config.num_gpu_blocks_override == 1 + 10_000_000 // 16


def test_a_models_config_says_what_is_in_proportion(
    truth: SimulatedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama-3.1-8B: 4 * 32 * 4096 FLOP a pair against 2 * 6.98e9 a token, 131,072 bytes against 15.0e9."""
    shape = shape_of(truth._model_name)
    assert shape is not None
    assert shape.pair == pytest.approx(3.76e-5, rel=0.01)
    assert shape.context == pytest.approx(8.73e-6, rel=0.01)
    (tmp_path / "config.json").write_text("{}")
    assert shape_of(str(tmp_path)) is None, "of an unknown architecture"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file: None)
    assert shape_of("org/model") is None, "and nothing is fetched"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda model, file: truth._model_name)
    assert shape_of("org/model") == shape, "what another program has fetched is read"


def test_it_survives_the_storage(fitted: FittedSimulator) -> None:
    again = FittedSimulator.from_json(json.loads(json.dumps(fitted.to_json())))
    assert again == fitted
    assert FittedSimulator.from_json(replace(fitted, memory=None).to_json()).memory is None


def optimizer_of(folder: Path, notebook: Notebook) -> Optimizer:
    return Optimizer(Job(), Bench(AnalyticTarget(), notebook, Interrupts(), folder), optuna.create_study())


def test_it_is_kept_with_the_study(fitted: FittedSimulator, tmp_path: Path) -> None:
    optimizer = optimizer_of(tmp_path, Notebook())
    optimizer.record.set_user_attr("fitted_simulator", fitted.to_json())
    kept = optimizer.fit_simulator()
    assert kept is not None
    assert measured(kept, {}).value("itl_p50") == measured(fitted.target, {}).value("itl_p50")


def test_a_study_whose_baseline_failed_has_no_prior_and_says_why(
    profile: Profile, baseline: TrialResult, tmp_path: Path
) -> None:
    notebook = Notebook()
    optimizer = optimizer_of(tmp_path, notebook)
    optimizer.profile = profile
    failed = replace(baseline, status="failed", measurement=None)
    optimizer.study = SimpleNamespace(baseline=failed)  # type: ignore[assignment]
    assert optimizer.fit_simulator() is None
    assert notebook.notes == ["no prior: the baseline could not be measured"]


@pytest.mark.parametrize(
    ("known", "result", "reason"),
    [
        ({}, {"status": "failed", "measurement": None}, "baseline could not be measured"),
        ({}, {"measurement": Measurement({"ttft_es95": Reading(0.1)}, 20.0)}, "no ITL"),
        ({"prefill_speed": math.nan}, {}, "lone prefill"),
        ({"prefill_speed": math.inf}, {}, "lone prefill"),
        ({"max_model_len": 64}, {}, "cannot be simulated: --max-model-len 4096"),
        ({"memory": None}, {"kv_tokens": 16}, "cannot be simulated: --num-gpu-blocks-override 2"),
    ],
)
def test_what_is_missing_is_said(
    profile: Profile, baseline: TrialResult, known: dict[str, Any], result: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CannotFit, match=reason):
        fit_simulator(replace(profile, **known), replace(baseline, **result), LOAD.rungs(), SLO)


def test_which_prior_is_asked(truth: SimulatedTarget) -> None:
    def made(name: str, target: str) -> Any:
        return make_simulator(name, target, "m", fitted=lambda: truth)()

    assert made("auto", "vllm") is truth
    assert made("auto", "my-server {flags}") is truth
    assert made("auto", "simulated:h100") is made("auto", "http://127.0.0.1:1") is None
    assert made("none", "vllm") is None
    assert made("sketch", "simulated:h100") is truth
    with pytest.raises(PriorError, match="sketch"):
        make_simulator("scetch", "vllm", "m")


def test_a_study_with_a_fitted_simulator(
    truth: SimulatedTarget,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.search.fitted_simulator.MAX_EVALUATIONS", 1)
    options = Options(
        target=truth.name,
        model=truth._model_name,
        prior="sketch",
        slo=SLO.text,
        workload=str(workload(tmp_path)),
        rate=5.0,
        run_time="4s",
        trials=1,
        pairs=2,
        flags="--max-num-batched-tokens 1024 --max-num-seqs 64 --max-model-len 4096",
        fix=["all"],
        vary=["max_num_batched_tokens=256"],
        place=Place(study="drawn", out=tmp_path / "out"),
    )
    assert run(options) in (0, 1)
    assert "prior: simulator fitted to the baseline: 0." in capsys.readouterr().err


def workload(folder: Path) -> Path:
    """Of CLASSES, in short."""
    path = folder / "workload.json"
    classes = [{"name": "chat", "prompt": 300, "output": 30}, {"name": "rag", "prompt": 1600, "output": 30}]
    path.write_text(json.dumps({"classes": classes}))
    return path
