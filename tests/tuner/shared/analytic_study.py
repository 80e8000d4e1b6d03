"""Studies of the analytic target, which strategies search without a server."""

from typing import Any

import optuna
from analytic_target import measure

from servers.slo.objective import PRESETS
from tuner.runs.result import BASELINE, SERVES, TrialResult
from tuner.search.study import Study
from tuner.space.space import build_space, effective
from tuner.workers.storage import open_study

SLO = PRESETS["itl"]
DEFAULTS = effective({}, "bundled")
BOUNDS = SLO.resolve(measure(DEFAULTS).value)


def make(strategy: Any, storage: Any = None, **space: Any) -> Any:
    record = open_study(storage or optuna.storages.InMemoryStorage(), "test", SLO.objective)
    study = Study(record, build_space(DEFAULTS, 8192, **space), SLO.objective, 1, strategy)
    study.bounds, study.relative = SLO.bounds, SLO.relative
    study.enqueue(DEFAULTS, BASELINE)
    return study


def result(proposal: Any) -> TrialResult:
    measurement = measure(proposal.config)
    violations = {SERVES: 0.0, **measurement.violations(BOUNDS)}
    return TrialResult(
        proposal.number,
        proposal.config,
        proposal.origin,
        "measured",
        measurement=measurement,
        short=measurement,
        violations=violations,
    )


def drive(study: Study, trials: int) -> Any:
    for _ in range(trials):
        proposal = study.propose()
        if proposal is None:
            break
        study.tell(proposal, result(proposal))
    return study.history.launched
