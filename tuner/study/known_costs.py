"""What a start and a trial of a server took in an earlier study, so that a budget is judged before the first
start."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from servers.files import write_atomically
from tuner.job.job import Job
from tuner.study.budget import Plan, choose_pairs

MOST_KEPT = 200
"""Servers whose costs are kept; the oldest give way."""


@dataclass(frozen=True)
class Costs:
    """Of one server. Seconds."""

    start: float
    profile: float
    """Between the first start and the baseline's load: the device is timed, the capacity found."""
    trial: float
    """One whole trial, its start included."""
    run: float
    """One load of a confirmation, drain included."""
    exclusive: bool
    """See :class:`~tuner.study.budget.Plan`."""

    def plan(self, job: Job) -> Plan:
        """As it would be made once the baseline is measured."""
        return Plan(
            start_seconds=self.start,
            trial_seconds=self.trial,
            run_seconds=self.run,
            pairs=job.pairs or choose_pairs(job.budget, self.start, self.run, self.exclusive),
            budget_seconds=job.budget,
            max_trials=job.trials,
            spent_seconds=self.profile + self.trial,
            exclusive=self.exclusive,
        )


@dataclass(frozen=True)
class KnownCosts:
    """``file``: where they are kept, from study to study; None: nowhere."""

    file: Path | None = None

    def of(self, job: Job) -> Costs | None:
        """Of the last study of the same server, workload and run length; None where there was none."""
        return self._kept().get(_key(job))

    def keep(self, job: Job, costs: Costs) -> None:
        """Where that can be written; else the next study knows nothing."""
        if self.file is None:
            return
        others = {key: told for key, told in self._kept().items() if key != _key(job)}
        latest = dict([*others.items(), (_key(job), costs)][-MOST_KEPT:])
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.file, [msgspec.json.encode(latest).decode(), "\n"])

    def _kept(self) -> dict[str, Costs]:
        """Nothing where the file is missing or no such file."""
        if self.file is None:
            return {}
        try:
            return msgspec.json.decode(self.file.read_bytes(), type=dict[str, Costs])
        except (OSError, msgspec.DecodeError):
            return {}


def _key(job: Job) -> str:
    """A digest, for commands may hold what is secret."""
    words = (job.target, job.command, job.model, job.workload, str(job.run_seconds))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
