"""The last trials of a search: what the best config needs, and what is too close to tell."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.search.study import Study
from tuner.study.budget import MAX_RESERVED_PAIRS, Clock, Plan

MAX_REPEATED_CONFIGS, MAX_REPEATS = 3, 2
"""Configs that are repeated at once, beside the baseline, and how often."""
MIN_TRIALS_TO_REPEAT = 10
"""Trials of a search before its last ones repeat any: a short one has better things to try."""


@dataclass(frozen=True)
class FinalTrials:
    """Queues trials."""

    study: Study
    plan: Plan
    clock: Clock

    def begin(self, left: int) -> None:
        """Queue what is due when only so many trials are ``left``."""
        best = self.study.best()
        if (
            left <= 1 + MAX_REPEATED_CONFIGS
            and sum(r.launched for r in self.study.results) >= MIN_TRIALS_TO_REPEAT
        ):
            self._close(left)
        if best is not None and left < len(self.study.space.changes(best.config)):
            self._simpler()

    def go_on(self, left: int) -> bool:
        """Whether anything is left to try where the strategy has no more; it is queued then."""
        return self._simpler() or self._close(left)

    def _simpler(self) -> bool:
        """Does the best config need all that it changes? The main knob stays."""
        best, space = self.study.best(), self.study.space
        if best is None:
            return False
        changed = [flag for flag in space.flags if flag in space.changes(best.config)]
        simpler = [(self.study.without_inactive(best.config), "best without what seems to do nothing")]
        for flag in reversed(changed[1:]):
            simpler.append(({**best.config, flag: space.baseline[flag]}, f"best without {flag}"))
        queued = [self.study.enqueue(config, why) for config, why in simpler if not space.refusals(config)]
        return any(queued)

    def _close(self, left: int) -> bool:
        """Configs of which a repeat could change what is recommended, and the baseline to compare them with,
        under a set of requests that no trial had.
        """
        baseline, request_set = (
            self.study.baseline,
            1 + max((r.request_set for r in self.study.results), default=0),
        )
        if (
            left < 2
            or request_set > MAX_REPEATS
            or self.study.repeating
            or not baseline
            or not baseline.measurement
        ):
            return False
        chosen = self.study.close()[: min(MAX_REPEATED_CONFIGS, left - 1)]
        if not chosen or not self._spares(1 + len(chosen)):
            return False
        for result in (baseline, *chosen):
            why = f"trial {result.number} again, on other requests: it is close"
            self.study.enqueue(result.config, why, request_set=request_set)
        return True

    def _spares(self, trials: int) -> bool:
        """Whether so many trials leave time for as many pairs of a confirmation as are ever planned: where
        they do not, more pairs tell more of what is close.
        """
        if self.plan.budget_seconds is None:
            return True
        spent = self.clock.spent + trials * self.plan.trial_seconds
        return self.plan.pairs_within(spent) >= MAX_RESERVED_PAIRS
