"""The last act: the best candidates of a search, one after the other, against the baseline on fresh runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadgen.compare import Pair, compare
from loadgen.target import TargetFailed
from servers.slo.objective import Slo
from tuner.job.job import Job
from tuner.runs.load import Traffic, load_seconds
from tuner.runs.measure import Run, goodput_bounds, measure
from tuner.runs.result import SERVES, TrialResult
from tuner.search.repeats import judge_repeat
from tuner.search.study import Study
from tuner.space.config import Config
from tuner.space.space import describe_changes
from tuner.study.budget import MAX_RESERVED_PAIRS, MIN_DIRECT_PAIRS, MIN_PAIRS, Clock, Plan
from tuner.study.confirmation import (
    Confirmation,
    assess,
    confidence_of,
    judge_pairs,
    looks,
    record_directory,
)
from tuner.study.outcome import (
    Outcome,
    as_it_runs,
    better,
    broken,
    unconfirmed,
    unproven,
    without_confirmation,
)
from tuner.study.trial import Bench, SetupFailed

MAX_CONFIRMED = 3
"""Candidates that are confirmed, one after the other, where the budget lasts."""
CONFIRMATION_SETS = 1_000
"""The sets of requests of a confirmation are counted from here, those of repeated trials from 1."""


@dataclass(frozen=True)
class CandidateConfirmation:
    """``flags``: what is given on the command line for a config. ``ended``: why the search did."""

    job: Job
    slo: Slo
    bench: Bench
    study: Study
    plan: Plan
    clock: Clock
    load: Callable[[], Traffic]
    flags: Callable[[Config], Mapping[str, Any]]
    ended: str
    fresh: list[TrialResult] = field(default_factory=list)
    """What the pairs so far measured, as repeats."""

    def outcome(self) -> Outcome:
        """Raises SetupFailed and KeyboardInterrupt."""
        study, slo, ended, observer = self.study, self.slo, self.ended, self.bench.observer
        baseline = study.baseline
        assert baseline is not None, "a search begins with the baseline"
        if not self.bench.target.restartable:
            return as_it_runs(baseline, self.bench.target.name, slo, ended)
        worth = [c for c in study.candidates() if self._worth_confirming(c, baseline)]
        first = next(iter(worth), None)
        if first is None:
            guess = self._best_guess_proven(baseline)
            return guess or without_confirmation(study.results, baseline, study.space, slo, ended)
        if baseline.status == "failed":
            return unconfirmed(first, baseline, study.space, slo, ended)
        observer.phase("confirmation")
        outcome, refused = self._confirmed(first, baseline, self._first_pairs()), {first.number}
        while outcome.kind != "better" and len(refused) < MAX_CONFIRMED:
            pairs, following = self._pairs(1), self._next(refused)
            if not pairs or following is None:
                break
            observer.note(f"{outcome.sentence}. There is time for the next best")
            refused.add(following.number)
            outcome = self._confirmed(following, baseline, pairs)
        return outcome

    def _next(self, refused: Collection[int]) -> TrialResult | None:
        """The best candidate but those that were refused, after all that was measured."""
        return next((c for c in self.study.candidates(self.fresh) if c.number not in refused), None)

    def _best_guess_proven(self, baseline: TrialResult) -> Outcome | None:
        """Where no trial is a candidate, for the time afforded none or the machine drifted: pairs of the most
        promising config, which are a trial and its confirmation in one. None where there is no time for them.
        """
        pairs = 0 if self.job.budget is None else self.plan.pairs_within(self.clock.spent)
        if baseline.status == "failed" or pairs < MIN_DIRECT_PAIRS:
            return None
        if missed := self._nearest_miss(baseline):
            self.bench.observer.phase("confirmation")
            return self._confirmed(missed, baseline, pairs)
        launched = sum(r.launched for r in self.study.results) - 1
        if (self.job.trials and launched >= self.job.trials) or (proposal := self.study.propose()) is None:
            return None
        self.bench.observer.phase("confirmation")
        candidate = TrialResult(proposal.number, proposal.config, proposal.origin, "measured")
        outcome = self._confirmed(candidate, baseline, pairs)
        if outcome.confirmation is None:
            told = replace(candidate, status="failed", reason=outcome.sentence, violations={SERVES: 1.0})
        else:
            measured = outcome.confirmation.candidate
            bounds = self.slo.resolve(outcome.confirmation.baseline.value)
            told = replace(
                candidate, measurement=measured, violations={SERVES: 0.0, **measured.violations(bounds)}
            )
        self.study.tell(proposal, told)
        return replace(outcome, best=told) if outcome.best else outcome

    def _nearest_miss(self, baseline: TrialResult) -> TrialResult | None:
        """Of the trials with a better objective than the baseline's, the one that misses its bounds least."""
        objective = self.slo.objective
        missed = [
            r
            for r in self.study.results
            if r.status == "measured"
            and self.study.space.changes(r.config)
            and objective.better(r.value(objective), baseline.value(objective))
        ]
        return min(missed, key=lambda r: r.excess, default=None)

    def _first_pairs(self) -> int:
        """Of the first candidate: all that is left of the budget, unless half of it is enough for proof."""
        half, all_of_it = self._pairs(2), self._pairs(1)
        return max(self.plan.pairs, half if half >= MAX_RESERVED_PAIRS else all_of_it)

    def _pairs(self, candidates: int) -> int:
        """Of runs of the next one, where time is left for so many; 0: too little for one more."""
        if self.job.budget is None:
            return self.plan.pairs
        fit = self.plan.pairs_within(self.clock.spent, candidates)
        if self.job.pairs:
            return self.job.pairs if fit >= self.job.pairs else 0
        return fit if fit >= MIN_PAIRS else 0

    def _worth_confirming(self, candidate: TrialResult, baseline: TrialResult) -> bool:
        """Unless one measurement each shows already that the candidate is no better than the baseline."""
        if not baseline.feasible:
            return True
        objective = self.slo.objective
        ours, theirs = baseline.reading(objective), candidate.reading(objective)
        if objective.better(theirs.value, ours.value):
            return True
        overlap = theirs.low < ours.high if objective.direction == "minimize" else theirs.high > ours.low
        return overlap and theirs.value != ours.value

    def _confirmed(self, best: TrialResult, baseline: TrialResult, pairs: int) -> Outcome:
        space, confirmation = self.study.space, self._confirm(best, baseline, pairs)
        if isinstance(confirmation, str):
            return broken(best, space, confirmation, self.ended)
        if confirmation.confirmed:
            return better(best, space, self.slo, confirmation, self.ended)
        return unproven(best, space, self.slo, confirmation, self.ended)

    def _confirm(self, best: TrialResult, baseline: TrialResult, pairs: int) -> Confirmation | str:
        """Fresh runs of both; a sentence where the best config did not serve them."""
        load = self.load()
        seeds = load.confirmation_seeds(pairs)
        changes = describe_changes(self.study.space.changes(best.config)) or "your own config"
        self.bench.observer.note(
            f"trial {best.number} against the baseline on {len(seeds)} fresh seeds, in turn: {changes}"
        )
        seconds = {seed: load_seconds(load.confirmation(seed)) for seed in seeds}
        judged = looks(pairs)

        def settled(done: Sequence[Pair]) -> bool:
            """Asked after every pair. Proof is looked for at the looks alone; what misses a bound, or needs
            more pairs than there is time for, makes way for what looks better after these pairs."""
            self.fresh.extend(self._as_repeats(best, baseline, done[-1], seconds[done[-1].seed]))
            look = len(done) in judged
            if not look and len(done) < MIN_PAIRS:
                return False
            known = judge_pairs(done, self.slo, seconds, best.number, baseline.feasible, confidence_of(pairs))
            hardly = known.missed or known.pairs_needed > pairs
            return (look and known.settled) or (hardly and self._outranked(best))

        try:
            with self.bench.interrupts.load() as stop:
                comparison = compare(
                    self.bench.target,
                    self.job.flags,
                    self.flags(best.config),
                    load.confirmation,
                    seeds=seeds,
                    metrics=[],
                    bounds=goodput_bounds(self.slo),
                    progress=self._confirming,
                    stop=stop,
                    enough=settled,
                )
        except TargetFailed as failure:
            if failure.environmental or failure.side == "a":
                raise SetupFailed(f"confirmation: {failure.detail}\n{failure.log_tail}".strip()) from None
            return f"{failure.reason}: {failure.detail}"
        for pair in comparison.pairs:
            for side, records in (("before", pair.a), ("after", pair.b)):
                records.save(self.bench.out / record_directory(best.number, side) / f"{pair.seed}.json")
        return assess(comparison, self.slo, seconds, best.number, baseline.feasible, confidence_of(pairs))

    def _as_repeats(
        self, best: TrialResult, baseline: TrialResult, pair: Pair, seconds: float
    ) -> list[TrialResult]:
        """A pair as one more measurement of both configs, on requests that no trial had."""
        request_set = CONFIRMATION_SETS + len(self.fresh)
        own, theirs = (
            replace(
                told,
                measurement=measured,
                violations=measured.violations(self.slo.bounds),
                request_set=request_set,
            )
            for told, records in ((baseline, pair.a), (best, pair.b))
            for measured in [measure([Run(records, seconds)], self.slo)]
        )
        return [own, judge_repeat(theirs, own, self.slo.relative)]

    def _outranked(self, best: TrialResult) -> bool:
        """Whether another candidate is the best one after all that was measured."""
        ranked = self.study.candidates(self.fresh)
        return bool(ranked) and ranked[0].number != best.number

    def _confirming(self, done: int, planned: int, what: str) -> None:
        self.bench.observer.budget(self.clock.spent, self.job.budget)
        self.bench.observer.step(f"run {done + 1} of {planned} ({what})", self.load().run_seconds)
