"""Everything that a report says of a study, gathered from where it is known."""

from __future__ import annotations

from loadgen.target import Target
from tuner.launch import launch
from tuner.loads import Advice
from tuner.optimize import Optimizer
from tuner.outcome import Outcome
from tuner.regression import Recommendation, compare_with, recommendation
from tuner.report import Facts
from tuner.reproduce import command_of


def report_facts(
    name: str, optimizer: Optimizer, outcome: Outcome, target: Target, advice: Advice | None = None
) -> Facts:
    """For a study whose baseline was begun."""
    job, study, survey = optimizer.job, optimizer.study, optimizer.survey
    baseline = study.baseline
    flags = job.flags if outcome.best is None else optimizer.flags(outcome.best.config)
    load = optimizer.load.description if survey.rate or survey.concurrency else "none: no server came up"
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
        importances=study.importances(),
        baseline_launch=launch(target.launch_command(job.flags), job.model, job.flags),
        best_launch=launch(target.launch_command(flags), job.model, flags) if outcome.best else None,
        load=load,
        survey=survey.describe() if survey.capacity else "the load was given",
        plan=optimizer.plan.describe() if optimizer.plan else "",
        seconds=optimizer.clock.spent,
        target=target.name,
        out=optimizer.bench.out,
        estimate=target.estimate,
        command=command_of(job, survey.rate, survey.concurrency),
        recommendation=recommended,
        regression=regression,
        advice=advice,
    )
