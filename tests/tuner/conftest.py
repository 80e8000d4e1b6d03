"""Fixtures of the tuner's tests. The helper modules beside this file are importable from every wing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from notebook import Notebook

from servers.slo.objective import parse_slo
from tuner.job.job import Job
from tuner.runs.interrupts import Interrupts
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench
from tuner.workers.storage import open_study


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Optimizers of one study, one after the other."""
    storage = optuna.storages.InMemoryStorage()

    def build(target: Any, notebook: Any = None, **given: Any) -> Optimizer:
        options = {"flags": {}, "rate": 1.0, "budget": None, "trials": 10, "run_seconds": 60.0, **given}
        bench = Bench(target, notebook or Notebook(), Interrupts(), tmp_path)
        job = Job(**options)
        return Optimizer(job, bench, open_study(storage, "s", parse_slo(job.slo).objective))

    return build
