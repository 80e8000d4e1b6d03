"""The search's memory and its proposals: an Optuna study driven by ask and tell.

A strategy proposes (``strategy.py``); what it leaves open Optuna's sampler fills in. How each outcome is
told, so that the sampler learns and no value is invented:

=================  =========  ==========================================  =========================
outcome            state      constraints                                 value
=================  =========  ==========================================  =========================
measured           COMPLETE   one for each bound, measured                measured
stopped early      PRUNED     the same, from the short rung               the short rung's, reported
did not serve      PRUNED     ``serves`` violated                         none
broke a rule       PRUNED     ``rule`` violated                           none
duplicate          as the earlier trial, with its constraints and value
interrupted        FAIL       none; tried again when the study resumes    none
=================  =========  ==========================================  =========================
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from servers.slo.bounds import Bound
from servers.slo.objective import Objective, RelativeBound
from tuner.runs.result import BASELINE, SERVES, Status, TrialResult
from tuner.search.repeats import judge_repeat
from tuner.search.strategy import History, Strategy, TpeStrategy
from tuner.space.space import Config, Space, config_key

RULE = "rule"

MIN_TRIALS_PER_KNOB = 5
"""Trials for each knob that was varied, and different outcomes in all: fewer say nothing about importance (a
knob that one trial of ten varies is the most important one)."""
MAX_FRUITLESS_PROPOSALS = 5
"""After so many proposals in a row that cannot be launched, an untried config is drawn at random."""
MAX_DEATHS = 1
"""A config in the middle of which more processes than this died is taken for one that does not serve."""


@dataclass(frozen=True)
class Proposal:
    """A config to be measured; it is told exactly once."""

    trial: Trial
    config: dict[str, Any]
    origin: str
    request_set: int = 0
    """Which set of requests to measure it under: see TrialResult."""

    @property
    def number(self) -> int:
        return self.trial.number


class Study:
    """One search over ``space`` for the best ``objective``.

    Not thread-safe. One process at a time may propose (see ``workers/coordination.py``); any number may tell.
    """

    def __init__(
        self,
        study: optuna.Study,
        space: Space,
        objective: Objective,
        seed: int = 0,
        strategy: Strategy | None = None,
    ) -> None:
        """``strategy``: constrained TPE where none is given."""
        self._study, self.space, self.objective = study, space, objective
        self.strategy = strategy or TpeStrategy(seed)
        self.bounds: tuple[Bound, ...] = ()
        self.relative: tuple[RelativeBound, ...] = ()
        """The SLO's, for strategies that model them; set by the optimizer."""
        self._read: dict[int, TrialResult] = {}
        told = len(study.get_trials(deepcopy=False))
        study.sampler = self.strategy.sampler(seed + told)
        self._rng = random.Random(seed + told)

    @property
    def optuna(self) -> optuna.Study:
        """The Optuna study underneath, for importances and for other tools."""
        return self._study

    @property
    def results(self) -> list[TrialResult]:
        """Every finished trial's result, by number; repeats as they are judged now."""
        finished = self._finished
        return [self._judged(result, finished) for result in finished]

    @property
    def _finished(self) -> list[TrialResult]:
        """As they were told."""
        for trial in self._study.get_trials(deepcopy=False):
            if trial.number not in self._read and "result" in trial.user_attrs:
                self._read[trial.number] = TrialResult.from_json(trial.user_attrs["result"])
        return [self._read[number] for number in sorted(self._read)]

    @property
    def running(self) -> list[FrozenTrial]:
        """Trials that some worker measures, or measured when it died."""
        return self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    @property
    def baseline(self) -> TrialResult | None:
        """The baseline's result, once there is one."""
        told = (r for r in self.results if r.status not in ("interrupted", "duplicate"))
        return next((r for r in told if r.origin == BASELINE), None)

    def judged(self, result: TrialResult) -> TrialResult:
        """A repeat held against the baseline's of the same requests, which may come later; others as they
        are."""
        return self._judged(result, self._finished)

    def _judged(self, result: TrialResult, finished: Sequence[TrialResult]) -> TrialResult:
        if not result.request_set or result.status != "measured" or not self.space.changes(result.config):
            return result
        own = self._baseline_again(result.request_set, finished)
        return judge_repeat(result, own if own and own.status == "measured" else None, self.relative)

    def _baseline_again(self, request_set: int, finished: Sequence[TrialResult]) -> TrialResult | None:
        """What came of the baseline under another set of requests."""
        told = (r for r in finished if r.request_set == request_set and r.launched)
        return next((r for r in told if not self.space.changes(r.config)), None)

    def _baseline_failed(self, request_set: int) -> str:
        """Why it did not serve under other requests; "" where it did, and while that is not known."""
        again = self._baseline_again(request_set, self._finished) if request_set else None
        return again.reason if again and again.status == "failed" else ""

    @property
    def repeating(self) -> bool:
        """Whether a repeat is queued, or runs in some worker."""
        return any(t.user_attrs.get("request_set") for t in (*self._queued(), *self._begun()))

    @property
    def history(self) -> History:
        """What a strategy may know."""
        running = tuple(trial.user_attrs["config"] for trial in self._begun())
        return replace(self._told, taken=frozenset(self._taken), best=self.best(), running=running)

    @property
    def _told(self) -> History:
        told = tuple(r for r in self.results if r.status not in ("interrupted", "duplicate") and r.judged)
        return History(self.space, self.objective, told, bounds=self.bounds, relative=self.relative)

    def enqueue(self, config: Config, origin: str, deaths: int = 0, request_set: int = 0) -> bool:
        """Propose ``config`` before anything of the sampler's. False, and nothing is queued, where it is
        queued or told already under the same ``request_set`` of the load.

        ``deaths`` counts the processes that ended in the middle of it.
        """
        own = origin == BASELINE or not self.space.changes(config)
        config = dict(self.space.baseline) if own else self.space.snap(config)
        if (config_key(config), request_set) in self._known():
            return False
        attributes = {"origin": origin, "queued": config, "deaths": deaths, "request_set": request_set}
        self._study.enqueue_trial(self.space.params(config), user_attrs=attributes)
        return True

    def propose(self) -> Proposal | None:
        """The next config that must be launched; None when the strategy has no more, or the space.

        Proposals that break a rule or repeat an earlier config are told on the spot and cost no launch.
        """
        for _ in range(MAX_FRUITLESS_PROPOSALS):
            if not self._queued():
                suggestion = self.strategy.propose(self.history)
                if suggestion is None:
                    return None
                attributes = {"origin": suggestion.origin, "expected": dict(suggestion.expected)}
                self._study.enqueue_trial(dict(suggestion.params), user_attrs=attributes)
            proposal = self._ask()
            while proposal is None and self._queued():
                proposal = self._ask()
            if proposal is not None:
                return proposal
        config = self.space.untried(self._taken, self._rng)
        if config is None:
            return None
        self.enqueue(config, "random, after the sampler repeated itself")
        return self._ask()

    def tell(self, proposal: Proposal, result: TrialResult) -> bool:
        """Record ``result`` and let the sampler learn from it (see the module).

        False, and nothing is recorded, if other workers took this one for dead and gave the trial up.
        """
        result = replace(result, expected=proposal.trial.user_attrs.get("expected", {}))
        try:
            proposal.trial.set_user_attr("result", result.to_json())
            if result.status == "interrupted":
                self._study.tell(proposal.trial, state=TrialState.FAIL, skip_if_finished=True)
            else:
                self._tell(proposal.trial, result, result.status)
        except UpdateFinishedTrialError:
            return False
        return True

    def _tell(self, trial: Trial, result: TrialResult, status: Status) -> None:
        for name, violation in result.violations.items():
            trial.set_constraint(name, violation)
        value = result.value(self.objective)
        if status == "measured" and math.isfinite(value):
            self._study.tell(trial, value, skip_if_finished=True)
            return
        if status == "stopped" and math.isfinite(value):
            trial.report(value, step=1)
        self._study.tell(trial, state=TrialState.PRUNED, skip_if_finished=True)

    def recover(self, is_dead: Callable[[FrozenTrial], bool] = lambda trial: True) -> int:
        """Fail the trials that a dead process left running, and queue them again; returns how many."""
        dead = [trial for trial in self.running if is_dead(trial)]
        for trial in dead:
            # One that has finished since was told by a worker that lives after all.
            self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
            attributes = trial.user_attrs
            config = attributes.get("config", attributes.get("queued"))
            if config is not None:  # else it died before it had decided what to launch
                origin, deaths = attributes.get("origin", "sampler"), attributes.get("deaths", 0)
                self.enqueue(config, origin, deaths + 1, attributes.get("request_set", 0))
        return len(dead)

    def interrupt(self, proposal: Proposal, reason: str, deaths: int = 0) -> None:
        """Give a proposal up without a result; its config is queued for when the study goes on.

        ``deaths``: of processes in the middle of it, now.
        """
        self._give_up(proposal, "interrupted", reason)
        deaths += proposal.trial.user_attrs.get("deaths", 0)
        self.enqueue(proposal.config, proposal.origin, deaths, proposal.request_set)

    def _give_up(self, proposal: Proposal, status: Status, reason: str, **parts: Any) -> None:
        """Tell what came of a proposal without a launch."""
        number, config, origin = proposal.number, proposal.config, proposal.origin
        self.tell(
            proposal,
            TrialResult(number, config, origin, status, reason, request_set=proposal.request_set, **parts),
        )

    def best(self) -> TrialResult | None:
        """The best feasible config so far, which may be the baseline."""
        return next(iter(self.strategy.rank(self._told)), None)

    def leaders(self) -> list[TrialResult | None]:
        """After each trial the one that was best by what was known then; None while nothing is feasible."""
        told = self._told
        known = ([r for r in told.results if r.number <= result.number] for result in self.results)
        return [next(iter(self.strategy.rank(replace(told, results=tuple(k)))), None) for k in known]

    def candidates(self, fresh: Sequence[TrialResult] = ()) -> list[TrialResult]:
        """Feasible configs other than the baseline's, in the order in which to confirm them.

        ``fresh``: what the confirmation measured so far, as repeats of the candidates and of the baseline.
        """
        told = self._told
        ranked = self.strategy.rank(replace(told, results=(*told.results, *fresh)))
        return [r for r in ranked if self.space.changes(r.config)]

    def without_inactive(self, config: Config) -> Config:
        """``config`` less the changes that are not expected to do anything: see Strategy."""
        return self.strategy.without_inactive(self._told, config)

    def close(self) -> list[TrialResult]:
        """Configs of which a repeat could change what is recommended: see Strategy."""
        return self.strategy.close(self._told)

    def importances(self) -> dict[str, float]:
        """Axis -> share of the objective's variation (PED-ANOVA); empty with too few trials.

        Taken on the short rungs, which trials that were stopped early have as well as the others.
        """
        shadow = optuna.create_study(direction=self.objective.direction)
        shared = {axis.name for axis in self.space.axes if axis.needs is None}
        for trial in self._study.get_trials(deepcopy=False):
            result = trial.user_attrs.get("result")
            # Repeats differ from the others by their requests as well.
            short = TrialResult.from_json(result).short if result and not result.get("request_set") else None
            value = short.value(self.objective.metric, self.objective.cls) if short else math.nan
            if math.isfinite(value) and shared <= trial.params.keys():
                distributions = {name: trial.distributions[name] for name in shared}
                params = {name: trial.params[name] for name in shared}
                shadow.add_trial(
                    optuna.trial.create_trial(params=params, distributions=distributions, value=value)
                )
        told = shadow.get_trials(deepcopy=False)
        varied = sorted(name for name in shared if len({t.params[name] for t in told}) > 1)
        if (
            not varied
            or len(told) < MIN_TRIALS_PER_KNOB * len(varied)
            or len({t.value for t in told}) < MIN_TRIALS_PER_KNOB
        ):
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5)
        found = optuna.importance.get_param_importances(shadow, evaluator=evaluator, params=varied)
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def _ask(self) -> Proposal | None:
        """Ask once; None where the proposal was settled without a launch."""
        trial = self._study.ask()
        origin, request_set = (
            trial.user_attrs.get("origin", "sampler"),
            trial.user_attrs.get("request_set", 0),
        )
        config, queued = self.space.suggest(trial), trial.user_attrs.get("queued")
        own = queued is not None and not self.space.changes(queued)
        if own:  # which may lie between the values of the space
            config = dict(self.space.baseline)
        proposal = Proposal(trial, config, origin, request_set)
        if earlier := self._earlier(config, request_set):
            reason = f"same config as trial {earlier.number}"
            repeat = replace(earlier, number=trial.number, origin=origin, status="duplicate", reason=reason)
            trial.set_user_attr("result", repeat.to_json())
            self._tell(trial, repeat, earlier.status)
        elif (config_key(config), request_set) in map(_key, self._begun()):
            self._give_up(proposal, "interrupted", "another worker measures the same config")
        elif not (own and request_set == 0) and trial.user_attrs.get("deaths", 0) > MAX_DEATHS:
            reason = "the tuner's process, or that of its load, died twice while this config was tried"
            seconds = {"start": 0.0, "total": 0.0}
            self._give_up(proposal, "failed", reason, violations={SERVES: 1.0}, seconds=seconds)
        elif not own and (why := self._baseline_failed(request_set)):
            self._give_up(proposal, "interrupted", f"the baseline failed on these requests: {why}")
        elif not own and (refusals := self.space.refusals(config)):
            broken = {RULE: float(len(refusals))}
            self._give_up(proposal, "refused", "; ".join(refusals), violations=broken)
        else:
            trial.set_user_attr("config", config)
            return proposal
        return None

    def _earlier(self, config: Config, request_set: int) -> TrialResult | None:
        """The first trial of the same config that came to something."""
        key = config_key(config)
        told = (
            r
            for r in self.results
            if r.status not in ("interrupted", "duplicate") and r.request_set == request_set
        )
        return next((r for r in told if config_key(r.config) == key), None)

    def _begun(self) -> list[FrozenTrial]:
        """Trials whose config is decided and whose result is not known yet."""
        return [t for t in self.running if "config" in t.user_attrs]

    def _queued(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))

    def _known(self) -> set[tuple[str, int]]:
        """(key, request set) of every config that is queued, runs in some worker, or came to something."""
        queued = [_key(t) for t in self._queued() if "queued" in t.user_attrs]
        told = [(config_key(r.config), r.request_set) for r in self.results if r.status != "interrupted"]
        return {*queued, *map(_key, self._begun()), *told}

    @property
    def _taken(self) -> set[str]:
        """Keys of those configs."""
        return {key for key, _ in self._known()}


def _key(trial: FrozenTrial) -> tuple[str, int]:
    """Of a trial that is queued or begun: its config's key, and its set of requests."""
    attributes = trial.user_attrs
    config = attributes.get("config", attributes.get("queued"))
    return config_key(config), attributes.get("request_set", 0)
