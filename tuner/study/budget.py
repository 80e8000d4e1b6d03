"""Where the time goes: how many trials a budget affords once the confirmation is paid for."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from tuner.job.job import Job, UsageError
from tuner.runs.result import TrialResult

MIN_PAIRS, MAX_RESERVED_PAIRS, MAX_PAIRS = 3, 8, 16
"""Of a confirmation: the least, the most that time is kept for, the most where the search leaves time."""
CONFIRM_SHARE = 0.55
"""Share of a time budget that the confirmation may take, unless MIN_PAIRS need more: of ten minutes enough to
give up a first candidate after three pairs and to prove a second one in four."""
MIN_DIRECT_PAIRS = 2
"""Least pairs of a config that no trial found to be better: fewer prove nothing."""
MIN_USEFUL_TRIALS = 5
"""Trials beside the baseline that a budget should afford."""
LOADS_SHARE, LOADS_CONFIGS = 0.25, 3
"""Of a budget, at most this share for the comparison at other loads; so many configs are measured there."""
PAUSE_SECONDS = 2.0
"""Seconds around a run that are not the run: drawing the schedule, warm-up, scrapes, parsing."""


_NUMBER = r"(\d+\.?\d*)"
_LENGTH = rf"(?:{_NUMBER}h)?(?:{_NUMBER}m(?:in)?)?(?:{_NUMBER}s?)?"


def format_seconds(seconds: float) -> str:
    """``42 s``, ``9 min 30 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def parse_seconds(text: str, option: str) -> float:
    """``90``, ``90s``, ``10m``, ``1.5h``, ``1h30m`` in seconds. Raises UsageError that names ``option``."""
    found = re.fullmatch(_LENGTH, text.strip())
    parts = [float(part) if part else 0.0 for part in found.groups()] if found else [0.0]
    seconds = sum(part * size for part, size in zip(parts, (3600, 60, 1), strict=False))
    if not seconds > 0:
        raise UsageError(f"{option}: {text!r} is no length of time: write e.g. 10m, 90s or 1h30m")
    return seconds


class Clock:
    """Seconds spent on a study by this process and those before it, as ``now`` counts them."""

    def __init__(self, spent: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now() - spent

    @property
    def spent(self) -> float:
        return self._now() - self._begun

    def advance_to(self, spent: float) -> None:
        """At least ``spent``, which another worker's clock says."""
        self._begun = min(self._begun, self._now() - spent)


@dataclass(frozen=True)
class Plan:
    """The budget plan: made after the baseline was measured, shown before the search."""

    start_seconds: float
    """One server start."""
    trial_seconds: float
    """One whole trial: start, warm-up, load, stop."""
    run_seconds: float
    """One load of a confirmation, drain included."""
    pairs: int
    """Pairs of runs of the confirmation; 0: none."""
    budget_seconds: float | None
    max_trials: int | None
    spent_seconds: float
    loads_seconds: float = 0.0
    """Kept for the comparison at other loads."""
    exclusive: bool = False
    """Whether two servers cannot be up at once, so that a confirmation starts them in turn."""

    @classmethod
    def after(
        cls,
        baseline: TrialResult,
        job: Job,
        *,
        run_seconds: float,
        levels_seconds: float,
        spent_seconds: float,
        exclusive: bool,
    ) -> Self:
        """By the baseline's costs; one that failed is taken to cost what a run takes.

        ``run_seconds``: of one load. ``levels_seconds``: of the loads of a comparison by load, of one config.
        """
        start, total = baseline.seconds["start"], baseline.seconds["total"]
        drains = max(1, len(baseline.records))  # one after each of a trial's loads
        run = max(run_seconds, run_seconds + (total - start - run_seconds) / drains)
        pairs = job.pairs or choose_pairs(job.budget, start, run, exclusive)
        kept = 0.0
        if job.budget is not None and levels_seconds:
            kept = min(LOADS_SHARE * job.budget, LOADS_CONFIGS * (start + levels_seconds))
        return cls(
            start_seconds=start,
            trial_seconds=max(total, run_seconds),
            run_seconds=run,
            pairs=0 if baseline.status == "failed" else pairs,
            budget_seconds=job.budget,
            max_trials=job.trials,
            spent_seconds=spent_seconds,
            loads_seconds=kept,
            exclusive=exclusive,
        )

    @property
    def confirm_seconds(self) -> float:
        """Two servers, then ``pairs`` times two loads."""
        opening, pair = confirmation_costs(self.start_seconds, self.run_seconds, self.exclusive)
        return opening + self.pairs * pair if self.pairs else 0.0

    def pairs_within(self, spent: float, candidates: int = 1) -> int:
        """Of the confirmation of one, so many as fit into the time left, if it is for several candidates."""
        assert self.budget_seconds is not None, "without a budget there is no time left"
        opening, pair = confirmation_costs(self.start_seconds, self.run_seconds, self.exclusive)
        left = (self.budget_seconds - spent - self.loads_seconds) / candidates - opening
        return max(0, min(MAX_PAIRS, int(left / pair)))

    @property
    def search_seconds(self) -> float:
        """Time left for trials; infinite without a time budget."""
        if self.budget_seconds is None:
            return math.inf
        return max(0.0, self.budget_seconds - self.spent_seconds - self.confirm_seconds - self.loads_seconds)

    @property
    def affordable_trials(self) -> int:
        """Trials beside the baseline that fit."""
        by_time = self.search_seconds / self.trial_seconds if self.trial_seconds > 0 else math.inf
        return int(min(by_time, math.inf if self.max_trials is None else self.max_trials))

    @property
    def shortage(self) -> str:
        """What a budget that affords no trial would have to be."""
        assert self.budget_seconds is not None, "without a budget every trial is afforded"
        spent, confirm, trial = self.spent_seconds, self.confirm_seconds, self.trial_seconds
        wanted = math.ceil((spent + confirm + self.loads_seconds + MIN_USEFUL_TRIALS * trial) / 60)
        return (
            f"the budget of {format_seconds(self.budget_seconds)} affords no other trial: "
            f"{format_seconds(spent)} are spent, the confirmation takes {format_seconds(confirm)}, "
            f"a trial {format_seconds(trial)}. Give --budget {wanted}m, or a shorter --run-time"
        )

    def describe(self) -> str:
        trial, confirm = format_seconds(self.trial_seconds), format_seconds(self.confirm_seconds)
        cost = f"a start costs {self.start_seconds:.1f} s, a trial about {trial}"
        if self.budget_seconds is None:
            return (
                f"{cost}. No budget: up to {self.max_trials} trials, then {confirm} for the confirmation "
                f"({self.pairs} pairs of runs)"
            )
        budget, spent = format_seconds(self.budget_seconds), format_seconds(self.spent_seconds)
        loads = f", {format_seconds(self.loads_seconds)} for other loads" if self.loads_seconds else ""
        if self.affordable_trials < 1 and self.pairs:
            pairs = self.pairs_within(self.spent_seconds)
            if pairs < MIN_DIRECT_PAIRS:
                return f"{cost}; {self.shortage}"
            return (
                f"{cost}; of {budget}, {spent} are spent: no trial is affordable beside the confirmation, so "
                f"the most promising change is put to the proof at once, in up to {pairs} pairs of runs"
            )
        return (
            f"{cost}. Budget {budget}: {spent} used, {confirm} reserved for the confirmation "
            f"({self.pairs} pairs of runs){loads}, room for about {self.affordable_trials} trials"
        )


def confirmation_costs(start_seconds: float, run_seconds: float, exclusive: bool) -> tuple[float, float]:
    """Seconds before the first pair of runs, and of each pair.

    In the order AB BA AB one server gives way to the other once a pair, where both do not fit at once.
    """
    runs = 2 * (run_seconds + PAUSE_SECONDS)
    return (start_seconds, runs + start_seconds) if exclusive else (2 * start_seconds, runs)


def choose_pairs(
    budget_seconds: float | None, start_seconds: float, run_seconds: float, exclusive: bool = False
) -> int:
    """As many pairs as CONFIRM_SHARE of the budget affords, within [MIN_PAIRS, MAX_RESERVED_PAIRS]."""
    if budget_seconds is None:
        return MAX_RESERVED_PAIRS
    opening, pair = confirmation_costs(start_seconds, run_seconds, exclusive)
    affordable = (CONFIRM_SHARE * budget_seconds - opening) / pair
    return max(MIN_PAIRS, min(MAX_RESERVED_PAIRS, int(affordable)))
