"""The whole job: baseline, budget plan, search, confirmation. What it learns goes into the study at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import optuna

from loadgen.sim.model_shape import shape_of
from loadgen.target import OpenTarget, Target
from servers.slo.bounds import metric_label
from servers.slo.objective import Slo, parse_slo
from tuner.job.job import Job
from tuner.runs.load import Traffic
from tuner.runs.profiling import Profile
from tuner.runs.result import BASELINE, TrialResult
from tuner.search.fitted_simulator import CannotFit, FittedSimulator, fit_simulator
from tuner.search.model import ModelStrategy
from tuner.search.prior import SimulatedPrior
from tuner.search.strategies import make_strategy
from tuner.search.study import Proposal, Study
from tuner.space.file import SpaceFile
from tuner.space.space import Config, build_space, describe_changes, effective
from tuner.study.budget import Clock, Plan
from tuner.study.candidate_confirmation import CandidateConfirmation
from tuner.study.cost import SPENT_ON
from tuner.study.criteria import Criteria
from tuner.study.final_trials import FinalTrials
from tuner.study.first_trials import FirstTrials
from tuner.study.known_costs import Costs, KnownCosts
from tuner.study.load_selection import LoadSelection
from tuner.study.outcome import Outcome, describe_trial
from tuner.study.trial import Attempt, Bench, ClientKilled, ServerFailed, SetupFailed
from tuner.workers.coordination import Coordination

MAX_FAILURES = 5
"""When nothing has served after so many launches, nothing will."""
BUSY_SHARE = "busy_share"
"""The study's attribute that keeps how busy others were."""


@dataclass
class Optimizer:
    """Runs one job against ``bench``; what ``record`` holds already is not done again."""

    job: Job
    bench: Bench
    record: optuna.Study
    coordination: Coordination = field(default_factory=Coordination)
    simulator: Callable[[], Target | None] = lambda: None
    """Makes what the prior simulates configs on, once no server runs; None: nothing to simulate with."""
    busy_share: Callable[[], float] = lambda: 0.0
    """Share of this machine's processors that others take; asked while no server runs."""
    known_costs: KnownCosts = field(default_factory=KnownCosts)
    """Of earlier studies."""
    study: Study = field(init=False)
    profile: Profile = field(init=False)
    plan: Plan | None = field(init=False, default=None)
    fitted: FittedSimulator | None = field(init=False, default=None)
    """Fitted to the baseline, where that is the prior."""

    def __post_init__(self) -> None:
        self.slo: Slo = parse_slo(self.job.slo)
        self.load_selection = LoadSelection(self.job, self.slo, self.bench)
        self.clock = Clock(self.record.user_attrs.get("spent", 0.0), self.bench.target.clock)
        self.observer = self.bench.observer

    def run(self) -> Outcome:
        """Search, and conclude. See there."""
        return self.conclude(self.search())

    def search(self) -> str:
        """Measure the baseline and all that the budget affords, until no other worker measures any more.

        Returns why it ended. Raises SetupFailed and KeyboardInterrupt; the study is whole in either case and
        can be resumed.
        """
        try:
            self.observer.phase("baseline")
            self._say_what_is_afforded()
            self._look_for_others()
            with self.coordination.sole("baseline", self._baseline_told):
                self._baseline()
            self._ask_prior()
            self._make_plan()
            self.observer.phase("search")
            while True:
                ended, known = self._search(), self.launched()
                # What others found out meanwhile may be reason to go on, or they have queued more.
                if self.coordination.settled(self.study) and self.launched() == known:
                    return ended
        finally:
            self._save_spent()

    def _say_what_is_afforded(self) -> None:
        """Before the first start, as far as an earlier study tells."""
        job = self.job
        if job.budget is None or job.simulated or job.running or self.record.user_attrs.get("profile"):
            return
        if (costs := self.known_costs.of(job)) is None:
            self.observer.note(
                "no start of this server is remembered: what the budget affords is said after it"
            )
        else:
            self.observer.note(f"as in the last study of this server, {costs.plan(job).describe()}")

    def _look_for_others(self) -> None:
        """Keep the largest share that other programs were seen to take."""
        self._save(BUSY_SHARE, max(self.record.user_attrs.get(BUSY_SHARE, 0.0), self.busy_share()))

    def conclude(self, ended: str) -> Outcome:
        """Confirm the best on fresh runs. Raises as :meth:`search`."""
        self._look_for_others()
        try:
            with self.spending("confirmation"):
                return self._candidate_confirmation(ended).outcome()
        finally:
            self._save_spent()

    def _candidate_confirmation(self, ended: str) -> CandidateConfirmation:
        assert self.plan is not None, "the confirmation follows the plan"
        job, slo, study = self.job, self.slo, self.study
        return CandidateConfirmation(
            job,
            slo,
            self.bench,
            study,
            self.plan,
            self.clock,
            lambda: self.load,
            self.flags,
            ended,
        )

    @contextmanager
    def spending(self, purpose: str) -> Iterator[None]:
        """Count the study's seconds meanwhile for ``purpose`` (see tuner.study.cost)."""
        began = self.clock.spent
        try:
            yield
        finally:
            booked = dict(self.record.user_attrs.get(SPENT_ON, {}))
            booked[purpose] = booked.get(purpose, 0.0) + self.clock.spent - began
            self._save(SPENT_ON, booked)

    def launched(self) -> int:
        """How many trials of the study came to something that was measured."""
        return len(self._launched())

    @property
    def begun(self) -> bool:
        """True once there is a study: the device is profiled, the space known."""
        return hasattr(self, "study")

    def interrupted(self) -> Outcome:
        """What can be said after a KeyboardInterrupt."""
        if not self.begun:
            return Outcome("interrupted", "Interrupted before the baseline was measured", "interrupted")
        best = self.study.best()
        found = "nothing that was measured holds the SLO" if self.launched() else "nothing is measured yet"
        if best is not None:
            changes = describe_changes(self.study.space.changes(best.config)) or "your own config"
            found = f"best so far, not confirmed: {changes} ({describe_trial(best, self.slo.objective)})"
        return Outcome("interrupted", f"Interrupted; {found}", "interrupted")

    # The baseline, and what is learnt with it.

    def _baseline(self) -> None:
        """Measure the user's config, unless the study has it; profile the device on the same server."""
        if saved := self.record.user_attrs.get("profile"):
            self._begin(Profile.from_json(saved))
            if dead := self.coordination.recover(self.study):
                self.observer.note(f"{dead} trial(s) whose process died will be tried again")
            if self.study.baseline is None:
                self._trial(self._proposed_baseline())
            return
        if (offered := self.load_selection.flags) is not None and offered.version:
            self.observer.note(f"{offered.program}: version {offered.version}")
        began = self.bench.target.clock()
        try:
            with self.bench.open(self.job.flags) as server:
                told = self.load_selection.start_facts(server)
                with self.spending("profile"):
                    profile = self.load_selection.profile(server)
                self._begin(replace(profile, **told))
                self._trial(self._proposed_baseline(), server)
        except ServerFailed as failure:
            self._begin(self.load_selection.assumed_profile())
            proposal = self._proposed_baseline()
            attempt = Attempt(self.bench, proposal, self.job.flags)
            attempt.begun = began  # a server that hangs as it starts has cost its time
            self._tell(proposal, attempt.failed(str(failure), failure.log_tail))

    def _baseline_told(self) -> bool:
        """Whether the study has it, by whichever worker; asked before there is a space."""
        told = [t.user_attrs.get("result") for t in self.record.get_trials(deepcopy=False)]
        return any(r and r["origin"] == BASELINE and r["status"] != "interrupted" for r in told)

    def _proposed_baseline(self) -> Proposal:
        with self.coordination.turn(self.study):
            self.study.enqueue(self.study.space.baseline, BASELINE)
            proposal = self.study.propose()
            assert proposal is not None, "a baseline that has not been measured can always be proposed"
            self.coordination.begins(proposal)
        return proposal

    def _begin(self, profile: Profile) -> None:
        """With the profile there is a space, and with the space there is a study."""
        self.profile = profile
        self._save("profile", profile.to_json())
        job = self.job
        baseline = effective({**profile.known, **job.flags}, job.server)
        space = build_space(
            baseline,
            profile.max_model_len,
            fix=job.fix,
            vary=job.vary,
            around=self.load_selection.surroundings(profile),
            file=SpaceFile.of(job.space) if job.space else None,
        )
        for note in space.notes:
            self.observer.note(note)
        seed = self.job.seed + self.coordination.seed_offset  # or two workers would propose the same
        self.study = Study(
            self.record, space, self.slo.objective, seed, make_strategy(self.job.strategy, seed)
        )
        self.study.bounds, self.study.relative = self.slo.bounds, self.slo.relative
        if self.load_selection.trace is not None:
            self.observer.note(f"load: {self.load.description}")

    def _load(self, server: OpenTarget) -> Traffic:
        """The load of every trial; found out on the first server that comes up."""
        if not self.load_selection.known(self.profile):
            self.profile = self.load_selection.profile(server)
            self._save("profile", self.profile.to_json())
        return self.load

    @property
    def load(self) -> Traffic:
        """The load of every trial, once it is known."""
        return self.load_selection.load(self.profile)

    def _ask_prior(self) -> None:
        """Give the search a simulation to begin with. What that takes is spent from the budget."""
        strategy = self.study.strategy
        if not self.bench.target.restartable:  # it is not searched
            return
        if not isinstance(strategy, ModelStrategy) or not self.load_selection.known(self.profile):
            return
        with self.spending("simulation"):
            self.observer.step("making a simulation")
            simulator = self.simulator()
        if simulator is not None:
            strategy.prior = prior = SimulatedPrior(simulator, self.load, self.slo, self.flags)
            self.observer.note(f"prior: {prior.source}")

    def fit_simulator(self) -> Target | None:
        """What to simulate configs on where nothing is known but the baseline; fitted once per study."""
        if saved := self.record.user_attrs.get("fitted_simulator"):
            self.fitted = FittedSimulator.from_json(saved)
            return self.fitted.target
        assert self.study.baseline is not None, "the baseline is told before a prior is asked for"
        try:
            shape = shape_of(self.job.model)
            self.fitted = fit_simulator(self.profile, self.study.baseline, self.load.rungs(), self.slo, shape)
        except CannotFit as reason:
            self.observer.note(f"no prior: {reason}")
            return None
        self._save("fitted_simulator", self.fitted.to_json())
        return self.fitted.target

    def _make_plan(self) -> None:
        baseline, selection = self.study.baseline, self.load_selection
        assert baseline is not None, "the baseline is told before the plan is made"
        known = selection.known(self.profile)
        self.plan = Plan.after(
            baseline,
            self.job,
            run_seconds=self.load.run_seconds if known else self.profile.run_seconds,
            levels_seconds=0.0 if self.job.budget is None else selection.levels_seconds(self.profile),
            spent_seconds=self.clock.spent,
            exclusive=self.bench.target.exclusive,
        )
        if not self.bench.target.restartable:
            return
        self.observer.note(self.plan.describe())
        if baseline.status != "failed" and not self.job.simulated:
            plan, trial = self.plan, baseline.seconds["total"]
            profile = max(0.0, self.clock.spent - trial)
            costs = Costs(plan.start_seconds, profile, trial, plan.run_seconds, plan.exclusive)
            self.known_costs.keep(self.job, costs)

    # The search.

    def _search(self) -> str:
        """Trials until there is a reason to stop, which is returned."""
        with self.coordination.turn(self.study):
            first = FirstTrials(self.job, self.slo, self.study, self.profile)
            first.queue(self._trials_left(), self.launched())
        while True:
            with self.coordination.turn(self.study):
                if over := self._over():
                    return over
                self._final_trials.begin(self._trials_left())
                with self.spending("choosing"):
                    proposal = self.study.propose()
                if proposal is None:
                    if self._final_trials.go_on(self._trials_left()):
                        continue
                    return self.study.strategy.exhausted
                self.coordination.begins(proposal)
            self._trial(proposal)

    @property
    def _final_trials(self) -> FinalTrials:
        assert self.plan is not None, "the search follows the plan"
        return FinalTrials(self.study, self.plan, self.clock)

    def _over(self) -> str:
        """Why the search must end now; "" while it may go on."""
        if not self.bench.target.restartable:
            return "the server runs already and is not restarted"
        launched, own = self._launched(), self.study.baseline
        if own is not None and own.status == "measured" and math.isnan(own.value(self.slo.objective)):
            return (
                f"this load has no {metric_label(self.slo.objective.name)}, such as gaps between tokens "
                "where every answer is one token. Give another --slo or --workload"
            )
        if len(launched) >= MAX_FAILURES and all(r.status == "failed" for r in launched):
            return f"nothing served in {len(launched)} launches"
        if self._trials_left() < 1:
            if len(launched) == 1 and self.plan is not None and self.job.budget is not None:
                return self.plan.shortage
            count = len(launched) - 1
            trials = "1 trial" if count == 1 else f"{count} trials"
            return f"{trials} were asked for" if count == self.job.trials else f"the budget allowed {trials}"
        return ""

    def _launched(self) -> list[TrialResult]:
        return [r for r in self.study.results if r.launched]

    def _trials_left(self) -> int:
        """By number, other workers' included, and by the time that is left beside the confirmation's."""
        assert self.plan is not None, "the search follows the plan"
        costs = [r.seconds["total"] for r in self._launched()]
        begun = len(costs) + len(self.study.running)
        now = replace(
            self.plan,
            trial_seconds=max(self.plan.trial_seconds / 2, sum(costs) / len(costs)),
            spent_seconds=self.clock.spent,
            max_trials=None if self.job.trials is None else self.job.trials - begun + 1,
        )
        return now.affordable_trials

    def _trial(self, proposal: Proposal, server: OpenTarget | None = None) -> None:
        space = self.study.space
        self.observer.budget(self.clock.spent, self.job.budget)
        changes = describe_changes(space.changes(proposal.config))
        self.observer.trial_begins(proposal.number, changes, proposal.origin)
        try:
            baseline, best = self.study.baseline, self.study.best()
            criteria = Criteria.of(self.slo, baseline, best, repeated=proposal.request_set > 0)
            result = self.bench.trial(proposal, self.flags(proposal.config), self._load, criteria, server)
        except ClientKilled as error:
            self.study.interrupt(proposal, str(error), deaths=1)
            if proposal.origin == BASELINE:
                raise
            self.observer.note(f"trial {proposal.number} is lost, and tried again: {error}")
            return
        except (KeyboardInterrupt, SetupFailed, OSError) as error:  # such as a disk that is full
            self.study.interrupt(proposal, type(error).__name__)
            raise
        self._tell(proposal, result)

    def _tell(self, proposal: Proposal, result: TrialResult) -> None:
        before, result = self.study.best(), self.study.judged(result)
        if not self.study.tell(proposal, result):
            self.observer.note(
                f"trial {proposal.number} took so long to be heard of that other workers took this one for "
                "dead: it is being measured again"
            )
        self._save_spent()
        self.observer.trial_ends(result, describe_trial(result, self.slo.objective))
        best = self.study.best()
        if best is not None and (before is None or best.number != before.number):
            self.observer.incumbent(best, describe_trial(best, self.slo.objective))

    def flags(self, config: Config) -> dict[str, Any]:
        """What is given on the command line: the user's flags, and what differs from them."""
        changed = {flag: new for flag, (_, new) in self.study.space.changes(config).items()}
        return {flag: value for flag, value in {**self.job.flags, **changed}.items() if value is not None}

    def _save_spent(self) -> None:
        """The workers' clocks go together: as much time is spent as the one says that was there first."""
        self.clock.advance_to(self.record.user_attrs.get("spent", 0.0))
        self._save("spent", self.clock.spent)

    def _save(self, key: str, value: Any) -> None:
        self.record.set_user_attr(key, value)
