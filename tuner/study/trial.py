"""One trial: start the server, warm it up, load it in one rung or two, read its metrics, stop it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.measure.record import Failure, Records
from loadgen.plan.load_policy import Progress
from loadgen.plan.workload import Schedule
from loadgen.target import CLIENT_KILLED, OpenTarget, Target, TargetFailed
from loadgen.wire.probe import Unreachable
from servers.errors import UserError
from servers.kind import ServerKind
from servers.kinds import VLLM
from tuner.runs.findings import examine
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import Traffic, load_seconds
from tuner.runs.load_watch import LoadWatch
from tuner.runs.measure import Run, measure
from tuner.runs.result import SERVES, Measurement, Status, TrialResult
from tuner.runs.rungs import reason_to_stop
from tuner.runs.scrape import read_figures
from tuner.runs.watchdog import Watchdog
from tuner.search.study import Proposal
from tuner.study.criteria import Criteria
from tuner.study.observer import Observer

BROKEN_SHARE = 0.5
"""A server that fails this share of the requests, or more, is taken for one that does not serve."""


WATCHDOG_SECONDS, WATCHDOG_FACTOR = 60.0, 3.0
"""A load of s seconds may take 60 + 3 s, warm-up and drain included, before its server counts as stuck; a
load of so many requests may take as long as one is answered every 60."""


class ServerFailed(Exception):
    """A server did not start, died, or hangs; the message is the reason."""

    def __init__(self, reason: str, log_tail: str) -> None:
        self.log_tail = log_tail
        super().__init__(reason)


class Stuck(Exception):
    """A load that does not end."""


class SetupFailed(UserError):
    """The machine or the command is at fault, not the config: nothing can be learnt by going on."""


class ClientKilled(SetupFailed):
    """What sends the load was killed: this trial is lost, but another try may do."""


@dataclass(frozen=True)
class Bench:
    """Runs loads and trials, showing them to ``observer``; an interrupt ends the load that runs."""

    target: Target
    observer: Observer
    interrupts: Interrupts
    out: Path
    """Where records are written."""
    kind: ServerKind | None = VLLM
    """Whose flags and metrics the doctor reads; None: as the metrics look."""
    watch: LoadWatch = field(default_factory=LoadWatch)
    """Ends loads on a server that is not ours."""

    def run(self, server: OpenTarget, schedule: Schedule) -> Records:
        """One load. Raises RunFailed, KeyboardInterrupt, and Stuck when it takes far too long."""
        seconds = load_seconds(schedule)
        limit = WATCHDOG_SECONDS + WATCHDOG_FACTOR * seconds
        with self.interrupts.load() as stop, Watchdog(limit, stop, renewed=not seconds) as watchdog:

            def progress(report: Progress) -> None:
                watchdog.answered(report.finished)
                self.observer.load(report)
                if not self.target.restartable:
                    self.watch.failed(report.failed, stop)

            ours = self.target.restartable
            with nullcontext() if ours else self.watch.watching(server.scrape, stop):
                records = server.run(schedule, progress=progress, stop=stop)
            if not ours:  # some failures are known only once the answers are read
                self.watch.failed(
                    sum(not r.ok and r.failure is not Failure.CANCELLED for r in records.requests), stop
                )
        if watchdog.exhausted and records.partial:
            if not seconds:
                raise Stuck(f"no request of {len(schedule.requests)} was answered for {limit:.0f} s")
            raise Stuck(f"a load of {seconds:.0f} s had not ended after {limit:.0f} s")
        return records

    @contextmanager
    def open(self, flags: Mapping[str, Any]) -> Iterator[OpenTarget]:
        """A server with these flags. Raises ServerFailed and SetupFailed."""
        ours = self.target.restartable
        self.observer.step("starting the server" if ours else f"connecting to {self.target.name}")
        failing = _faults("did not start" if ours else "does not serve")
        with failing, self.target.open(flags) as server, _faults("died under load", server):
            yield server

    def trial(
        self,
        proposal: Proposal,
        flags: Mapping[str, Any],
        load_for: Callable[[OpenTarget], Traffic],
        criteria: Criteria,
        server: OpenTarget | None = None,
    ) -> TrialResult:
        """Start a server (unless ``server`` runs with these flags already) and measure it.

        ``load_for`` decides on the load once there is a server to ask. Raises SetupFailed and
        KeyboardInterrupt; whatever a server does is a result.
        """
        attempt = Attempt(self, proposal, flags)
        try:
            if server is not None:
                attempt.begun -= server.start_seconds  # so that every trial's cost includes its start
                with _faults("died under load", server):
                    return attempt.measure(server, load_for(server), criteria)
            with self.open(flags) as server:
                return attempt.measure(server, load_for(server), criteria)
        except ServerFailed as failure:
            return attempt.failed(str(failure), failure.log_tail)


@contextmanager
def _faults(what: str, server: OpenTarget | None = None) -> Iterator[None]:
    """Turn what a target raises into ServerFailed, or SetupFailed where the config is not to blame."""
    try:
        yield
    except TargetFailed as failure:
        if failure.reason == CLIENT_KILLED:
            raise ClientKilled(failure.detail) from None
        if failure.environmental:
            raise SetupFailed(_at_fault(failure)) from None
        raise ServerFailed(f"{what}: {failure.reason}: {failure.detail}", failure.log_tail) from None
    except Unreachable as error:
        raise ServerFailed(f"{what}: {error}", server.log_tail() if server else "") from None
    except Stuck as stuck:
        raise ServerFailed(f"hangs: {stuck}", server.log_tail() if server else "") from None


def _at_fault(failure: TargetFailed) -> str:
    """What is wrong with the machine or the command, for people."""
    told = failure.detail
    if failure.reason == "port_taken":
        told += (
            ". So it was with every free port that the server was given. If the command sets the port "
            "itself, write {port} where it goes"
        )
    log = "" if failure.log_tail.strip() in failure.detail else failure.log_tail
    return f"{told}\n{log}".strip()


@dataclass
class Attempt:
    """A trial that is going on: the parts of its result as they come in."""

    bench: Bench
    proposal: Proposal
    flags: Mapping[str, Any]
    """As given to the server, or said to be."""
    begun: float = field(init=False)
    """On the target's clock."""
    start_seconds: float = 0.0
    runs: list[Run] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: {"warm-up": 0.0, "load": 0.0})
    """Seconds by purpose."""

    def __post_init__(self) -> None:
        self.begun = self.bench.target.clock()

    def measure(self, server: OpenTarget, load: Traffic, criteria: Criteria) -> TrialResult:
        """All rungs on a server that is up, or one where that is enough. Raises RunFailed, Stuck."""
        self.start_seconds = server.start_seconds
        first, *rest = load.rungs(self.proposal.request_set)
        if broken := self._rung(server, first, f"load 1 of {1 + len(rest)}" if rest else "load"):
            return self.failed(broken, server.log_tail())
        short = whole = measure(self.runs, criteria.slo)
        ended = self.bench.watch.reason
        if rest and not ended:
            ended = reason_to_stop(
                short,
                criteria.short_bounds,
                criteria.slo.objective,
                criteria.incumbent,
                criteria.incumbent_whole,
            )
        if ended:
            return self._measured(server, "stopped", ended, short, short, criteria)
        for number, part in enumerate(rest, start=2):
            if broken := self._rung(server, part, f"load {number} of {1 + len(rest)}"):
                return self.failed(broken, server.log_tail())
            whole, ended = measure(self.runs, criteria.slo), self.bench.watch.reason
        return self._measured(server, "stopped" if ended else "measured", ended, short, whole, criteria)

    def _rung(self, server: OpenTarget, schedule: Schedule, what: str) -> str:
        """Run one rung; returns what is wrong with the server, "" for nothing."""
        self.bench.observer.step(what, load_seconds(schedule))
        began = self.bench.target.clock()
        records = self.bench.run(server, schedule)
        loaded = max((request.end for request in records.requests), default=0) / 1e9
        self.spent["load"] += loaded
        self.spent["warm-up"] += max(0.0, self.bench.target.clock() - began - loaded)
        planned = load_seconds(schedule)  # a load that ended early says nothing of the rest
        self.runs.append(Run(records, min(planned, loaded) if loaded else planned))
        path = Path("trials") / f"{self.proposal.number:03d}-{len(self.runs)}.json"
        records.save(self.bench.out / path)
        self.files.append(str(path))
        broken, ended = _broken(self.runs[-1].whole), self.bench.watch.reason
        if not ended:
            return broken
        return (
            ""
            if any(r.ok for run in self.runs for r in run.records.requests)
            else f"{ended}; none was answered"
        )

    def failed(self, reason: str, log_tail: str) -> TrialResult:
        return self._result("failed", reason, violations={SERVES: 1.0}, log_tail=log_tail)

    def _measured(
        self,
        server: OpenTarget,
        status: Status,
        reason: str,
        short: Measurement,
        measurement: Measurement,
        criteria: Criteria,
    ) -> TrialResult:
        bounds = criteria.short_bounds if status == "stopped" else criteria.bounds
        scrapes = [scrape for run in self.runs for scrape in run.records.scrapes]
        figures = read_figures(scrapes, server.log_tail(200))
        ours = self.bench.target.restartable  # then what is not given has the default of its kind
        known = self.proposal.config if ours else self.flags
        given = {flag: value for flag, value in known.items() if value is not None}
        findings, unexamined = examine(scrapes, given, criteria.slo.bounds, self.bench.kind)
        return self._result(
            status,
            reason,
            violations={SERVES: 0.0, **measurement.violations(bounds)},
            measurement=measurement,
            short=short,
            kv_tokens=figures.kv_tokens,
            peak_running=figures.peak_running,
            preemptions=figures.preemptions,
            peak_kv_usage=figures.peak_kv_usage,
            prefix_hits=figures.prefix_hits,
            findings=findings,
            unexamined=unexamined,
        )

    def _result(self, status: Status, reason: str, **parts: Any) -> TrialResult:
        return TrialResult(
            number=self.proposal.number,
            config=self.proposal.config,
            origin=self.proposal.origin,
            status=status,
            reason=reason,
            seconds={
                "start": self.start_seconds,
                **self.spent,
                "total": self.bench.target.clock() - self.begun,
            },
            records=tuple(self.files),
            request_set=self.proposal.request_set,
            **parts,
        )


def _broken(records: Records) -> str:
    """What is wrong with a server that fails BROKEN_SHARE of its requests; "" for one that serves."""
    counted = records.in_window()
    failures = Counter(
        f"{r.failure}: {r.detail}" if r.detail else f"{r.failure}" for r in counted if not r.ok
    )
    if not counted:
        return "no request was measured" + (f": {'; '.join(records.reasons)}" if records.reasons else "")
    if failures.total() < BROKEN_SHARE * len(counted):
        return ""
    cause, times = failures.most_common(1)[0]
    return f"{failures.total()} of {len(counted)} requests failed, {times} with {cause}"
