"""The first trials of a search: what the doctor prescribes, and where practitioners start."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from servers.slo.objective import Slo
from tuner.job.job import Job
from tuner.runs.profiling import Profile
from tuner.search.from_doctor import Hints, of_trial, prescribed
from tuner.search.initial_design import REFERENCE_PREFILL_SPEED, REFERENCE_TOKENS, starting_points
from tuner.search.model import ModelStrategy
from tuner.search.study import Study

FEW_TRIALS = 10
"""Below this many, a practitioner's starting point is tried also where a prior knows better."""
PRESCRIBED_PER_TRIALS = 4
"""One in this many trials may be the doctor's, and one in any case."""
DEFAULT_RUNNING_REQUESTS = 16
"""In service at the baseline, where no metric says."""


@dataclass(frozen=True)
class FirstTrials:
    """Queues trials, once the baseline is measured."""

    job: Job
    slo: Slo
    study: Study
    profile: Profile

    def queue(self, left: int, launched: int) -> None:
        """``left``: trials that are affordable; ``launched``: those that were. Those that were queued before
        are not queued again."""
        strategy = self.study.strategy
        if isinstance(strategy, ModelStrategy):  # in the first half of all trials
            strategy.hints = Hints.of(self._findings, self.study.space, (launched + left) // 2)
        prescriptions = prescribed(self._findings, self.study.space)
        number = strategy.starts or int(left < FEW_TRIALS)
        first = (
            *itertools.islice(prescriptions, max(1, left // PRESCRIBED_PER_TRIALS)),
            *itertools.islice(self._starting_points(), number),
        )
        for flags, why in first:
            self.study.enqueue(flags, why)

    @property
    def _findings(self) -> list[Mapping[str, Any]]:
        """The doctor's prescriptions: of the report that was given, else of the baseline's own trial."""
        baseline = self.study.baseline
        return list(self.job.from_doctor or (of_trial(baseline.findings) if baseline else ()))

    def _starting_points(self) -> Iterator[tuple[Mapping[str, Any], str]]:
        config, measured = self.study.space.baseline, self.study.baseline
        speed = self.profile.prefill_speed
        if math.isnan(speed):  # then the baseline's budget is taken for what the device's default should be
            speed = REFERENCE_PREFILL_SPEED * config["max_num_batched_tokens"] / REFERENCE_TOKENS
        running = measured.peak_running if measured else None
        running = running or min(DEFAULT_RUNNING_REQUESTS, config["max_num_seqs"])
        itl = measured.measurement.value("itl_p50") if measured and measured.measurement else math.nan
        return starting_points(self.slo, config, speed, running, itl, self.profile.concurrency)
