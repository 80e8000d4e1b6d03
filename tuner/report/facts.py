"""Everything that a report says of a study, gathered from where it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadgen.targets.simulated import SimulatedTarget
from servers.kinds import KINDS
from tuner.job.launch import Launch, launch
from tuner.report.curves import along
from tuner.report.report import Facts
from tuner.report.reproduce import command_of
from tuner.search.model import ModelStrategy
from tuner.search.prior import SimulatedPrior
from tuner.space.space import config_key
from tuner.study.cost import SPENT_ON
from tuner.study.loads import Advice
from tuner.study.optimize import Optimizer
from tuner.study.outcome import Outcome
from tuner.study.regression import Recommendation, compare_with, recommendation

MAX_SIMULATED_CONFIGS = 16
"""Simulated runs for the report alone: a few seconds."""


def report_facts(optimizer: Optimizer, outcome: Outcome, advice: Advice | None = None) -> Facts:
    """For a study whose baseline was begun."""
    name, target = optimizer.record.study_name, optimizer.bench.target
    job, study, profile = optimizer.job, optimizer.study, optimizer.profile
    baseline = study.baseline
    model = target.served_name if isinstance(target, SimulatedTarget) else job.model
    flags = job.flags if outcome.best is None else optimizer.flags(outcome.best.config)
    load = optimizer.load.description if profile.rate or profile.concurrency else "none: no server came up"
    seconds = optimizer.clock.spent  # before what the report itself simulates
    predictions, prior = _predictions(optimizer, outcome)
    recommended, regression = None, None
    if baseline is not None:
        recommended = recommendation(name, outcome, baseline, flags, load, job.to_json())
        if job.baseline is not None:
            previous = Recommendation.from_json(job.baseline)
            regression = compare_with(previous, outcome, baseline, optimizer.slo)
    return Facts(
        study=name,
        slo=optimizer.slo,
        space=study.space,
        outcome=outcome,
        results=study.results,
        leaders=study.leaders(),
        ped_anova=study.importances(),
        baseline_launch=_launch(optimizer, model, job.flags),
        best_launch=_launch(optimizer, model, flags) if outcome.best else None,
        load=load,
        profile=profile.describe() if profile.capacity else "the load was given",
        plan=optimizer.plan.describe() if optimizer.plan else "",
        seconds=seconds,
        target=target.name,
        out=optimizer.bench.out,
        estimate=target.estimate,
        command=command_of(job, profile.rate, profile.concurrency),
        recommendation=recommended,
        regression=regression,
        advice=advice,
        predictions=predictions,
        prior=prior,
        spent_on=optimizer.record.user_attrs.get(SPENT_ON, {}),
    )


def _launch(optimizer: Optimizer, model: str, flags: Mapping[str, Any]) -> Launch:
    job, target = optimizer.job, optimizer.bench.target
    measured_vllm = job.server == "vllm" and not job.simulated
    version = optimizer.profile.version if measured_vllm else ""
    return launch(target.launch_command(flags), model, flags, KINDS[job.server], version)


def _predictions(optimizer: Optimizer, outcome: Outcome) -> tuple[dict[str, dict[str, float]], str]:
    """What is simulated of configs, by config_key, and where that comes from.

    Beside what the search asked, the values of each knob through the recommended config, up to
    MAX_SIMULATED_CONFIGS.
    """
    strategy, space = optimizer.study.strategy, optimizer.study.space
    prior = strategy.prior if isinstance(strategy, ModelStrategy) else None
    if optimizer.job.simulated and optimizer.load_selection.known(optimizer.profile):
        target = optimizer.bench.target
        prior = SimulatedPrior(target, optimizer.load, optimizer.slo, optimizer.flags)
    if prior is None:
        return {}, ""
    best = outcome.best.config if outcome.best else space.baseline
    measured = {config_key(r.config) for r in optimizer.study.results if r.measurement}
    wanted = {
        config_key(c): c for axis in space.axes for c in along(axis, best, space) if not space.refusals(c)
    }
    if outcome.kind != "interrupted":
        skipped = measured if optimizer.job.simulated else set()  # there a prediction is the measurement
        asked = [c for key, c in wanted.items() if key not in prior.known and key not in skipped]
        prior.ask(asked[:MAX_SIMULATED_CONFIGS])
    known = {
        key: dict(prediction.values) for key, prediction in prior.known.items() if not prediction.failure
    }
    return known, prior.source
