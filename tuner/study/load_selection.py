"""The load that a study offers: as the job asks for it, or found out on the first server that comes up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from loadgen.plan.traces import Trace
from loadgen.plan.workload import DEFAULT_VOCAB_SIZE, Workload
from loadgen.plan.workload_file import workload_of
from loadgen.target import OpenTarget
from servers.flags.offered_flags import OfferedFlags
from servers.kinds import KINDS
from servers.memory_plan import MemoryPlan
from servers.slo.objective import Slo
from servers.start_log import LINES, read_start_log
from tuner.job.job import DEFAULT_RUN_SECONDS, Job
from tuner.job.options import Replay
from tuner.runs.load import GeneratedLoad, Traffic, load_seconds
from tuner.runs.profiling import OFFERED_SHARE, Profile, find_capacity, fitting_scale, time_alone
from tuner.runs.replay import ReplayLoad, read_replay
from tuner.space.knobs import started_with
from tuner.space.space import Surroundings, effective
from tuner.study.budget import PAUSE_SECONDS
from tuner.study.running_server import most_requests, small_scale
from tuner.study.trial import Bench

FALLBACK_CONTEXT_TOKENS = 4096
"""Context length assumed where the baseline does not come up to be asked."""
LONGEST_RUN_SECONDS, RUN_BUDGET_SHARE = 90.0, 0.025
"""Most seconds of a run whose length was not asked for, and the most of a budget."""
CAPACITY_SHARE = 0.5
"""Length of a closed loop to find the capacity, as a share of a run."""


@dataclass
class LoadSelection:
    """What ``job`` offers; a profile of a server says the rest."""

    job: Job
    slo: Slo
    bench: Bench

    @cached_property
    def trace(self) -> Trace | None:
        """What is replayed; None where a workload is generated."""
        return read_replay(self.job.replay) if self.job.replay else None

    @cached_property
    def flags(self) -> OfferedFlags | None:
        """The flags that the target takes, as far as it says."""
        return self.bench.target.offered_flags()

    @property
    def rate(self) -> float | None:
        """Requests/s as asked for; None: to be found out."""
        if self.job.replay is None or self.trace is None:
            return self.job.rate
        return self.trace.rate * self.job.replay["rate_scale"]

    def known(self, profile: Profile) -> bool:
        """Whether there is a load: not before some server came up, unless the job says."""
        return self.trace is not None or (profile.rate or profile.concurrency) is not None

    def load(self, profile: Profile) -> Traffic:
        """The load of every trial; the profile must know one."""
        if self.trace is not None:
            return self._replayed(profile)
        workload = self.workload(profile.max_model_len, profile.scale)
        load = GeneratedLoad(workload, self.job.seed, profile.run_seconds, profile.rate, profile.concurrency)
        if not self.job.running or load.concurrency is None:
            return load
        return replace(load, most=most_requests(load.concurrency, load.seconds))

    def levels(self, profile: Profile) -> tuple[float, ...]:
        """Levels of load to compare configs at, once there is a best one; rising, () for none."""
        if self.job.loads is not None:
            return self.job.loads
        return self.load(profile).levels() if self.known(profile) else ()

    def levels_seconds(self, profile: Profile) -> float:
        """What a config takes at all levels, one run each; 0 without levels."""
        levels = self.levels(profile)
        return sum(load_seconds(self.load(profile).at_level(level, 0)) + PAUSE_SECONDS for level in levels)

    def workload(self, max_model_len: int, scale: float | None) -> Workload:
        return workload_of(
            self.job.workload, max_model_len=max_model_len, vocab_size=DEFAULT_VOCAB_SIZE, scale=scale
        )

    def _replayed(self, profile: Profile) -> ReplayLoad:
        job, kept, max_model_len = self.job, self._kept, profile.max_model_len
        assert job.replay is not None, "there is a trace where it is replayed"
        assert self.trace is not None
        if max_model_len not in kept:
            replay = Replay.from_json(job.replay)
            kept[max_model_len] = ReplayLoad.of(
                replay, self.trace, job.seed, profile.run_seconds, max_model_len, concurrency=job.concurrency
            )
        return kept[max_model_len]

    @cached_property
    def _kept(self) -> dict[int, ReplayLoad]:
        """By context length: to cut a long trace takes a while."""
        return {}

    # What a server tells.

    def profile(self, server: OpenTarget) -> Profile:
        """Ask and time the server. Raises RunFailed, Stuck, KeyboardInterrupt."""
        job, observer = self.job, self.bench.observer
        if job.running:
            return self.untimed_profile(server.max_model_len)
        context = server.max_model_len or self.assumed_profile().max_model_len
        observer.step("timing a lone request")
        alone = time_alone(server, context, job.seed, self.bench.run)
        scale = job.scale or fitting_scale(job.workload, context, alone.prefill_speed)
        workload = self.workload(context, scale)
        observer.note(
            f"single-request speed: prefill {alone.prefill_speed:,.0f} tok/s, decode "
            f"{alone.itl * 1e3:.3g} ms/token"
            + ("" if alone.steady else " (no two requests took the same time: do others use the server?)")
            + (f"; load: {workload.description}" if self.trace is None else "")
        )
        profile = Profile(
            context,
            server.start_seconds,
            alone.prefill_speed,
            rate=self.rate,
            concurrency=job.concurrency,
            scale=scale,
            run_seconds=self._run_seconds(server.start_seconds),
            lone_itl=alone.itl,
        )
        if not self.known(profile):
            profile = self._measured(profile, workload, server)
            observer.note(profile.describe())
        return profile

    def _measured(self, profile: Profile, workload: Workload, server: OpenTarget) -> Profile:
        """With a rate, or a concurrency, by what the server can do."""
        self.bench.observer.step("finding the capacity in a closed loop")
        seqs = effective(self.job.flags, self.job.server)["max_num_seqs"]
        seconds = CAPACITY_SHARE * (self.job.run_seconds or DEFAULT_RUN_SECONDS)
        found = find_capacity(server, workload, self.job.seed, seconds, self.bench.run, seqs)
        _, concurrency, rate = found[-1]
        if self.slo.saturated:
            return replace(profile, capacity=found, concurrency=concurrency)
        return replace(profile, capacity=found, rate=OFFERED_SHARE * rate)

    def _run_seconds(self, start_seconds: float) -> float:
        """As asked for. Else what a start takes, which every trial pays anyway: a run as long makes the trial
        half as dear again, and says twice as much as one of half the length.
        """
        job = self.job
        if job.run_seconds is not None or job.simulated or self.trace is not None:
            return job.run_seconds or DEFAULT_RUN_SECONDS
        most = (
            LONGEST_RUN_SECONDS
            if job.budget is None
            else min(LONGEST_RUN_SECONDS, RUN_BUDGET_SHARE * job.budget)
        )
        return max(DEFAULT_RUN_SECONDS, min(start_seconds, most))

    def start_facts(self, server: OpenTarget) -> dict[str, Any]:
        """What the start of the baseline's server tells, as fields of a profile.

        To be read before a load fills the log.
        """
        job, log = self.job, server.log_tail(LINES)
        told = read_start_log(
            log,
            KINDS[job.server],
            job.flags,
            started_with(job.server),
            metrics=server.scrape(),
            version=server.version,
            proportional=job.simulated,
        )
        memory = told.memory.to_json() if told.memory else None
        return {"version": told.version or "", "known": dict(told.flags), "memory": memory}

    def untimed_profile(self, max_model_len: int | None) -> Profile:
        """Of a server that is not ours, which gets the stated load alone: nothing is timed on it."""
        known = self.assumed_profile()
        context = max_model_len or known.max_model_len
        scale = self.job.scale or small_scale(self.job.workload, context)
        return replace(known, max_model_len=context, start_seconds=0.0, scale=scale)

    def assumed_profile(self) -> Profile:
        """For a baseline that does not come up: what the job and the program say."""
        context = self.job.flags.get("max_model_len")
        version = (self.flags.version if self.flags else None) or ""
        server = self.job.server
        told = read_start_log("", KINDS[server], self.job.flags, started_with(server), version=version)
        return Profile(
            max_model_len=context if isinstance(context, int) else FALLBACK_CONTEXT_TOKENS,
            start_seconds=math.nan,
            prefill_speed=math.nan,
            rate=self.rate,
            concurrency=self.job.concurrency,
            scale=self.job.scale,
            run_seconds=self._run_seconds(0.0),
            version=version,
            known=told.flags,
        )

    def surroundings(self, profile: Profile) -> Surroundings:
        """What the profile and the workload say about the space."""
        longest = mean = None
        if self.trace is None:
            classes = self.workload(profile.max_model_len, profile.scale).classes
            longest = max(c.prompt.high + c.output.high for c in classes)
            shares = sum(c.weight for c in classes)
            mean = sum(c.weight * (c.prompt.mean + c.output.mean) for c in classes) / shares
        memory = MemoryPlan(**profile.memory) if profile.memory else None
        return Surroundings(
            self.job.server, profile.max_model_len, longest, mean, offered=self.flags, memory=memory
        )
