"""``vtune optimize`` behind its options: one study, by one worker or by several on this machine."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import optuna
from rich.console import Console

from loadgen.sim.simulated_engine import EngineUserError, cache_dir
from loadgen.targets.endpoint import EndpointTarget
from servers.kinds import KINDS
from servers.slo.objective import parse_slo
from tuner.job.job import Job, UsageError
from tuner.job.options import Options
from tuner.output.display import Terminal, make_observer
from tuner.output.folder import locked
from tuner.report.study_result import StudyResult, conclude, finish_study
from tuner.runs.interrupts import Interrupts
from tuner.runs.load_watch import LoadWatch
from tuner.search.prior import make_simulator
from tuner.session.new_job import RUNS
from tuner.session.session import StudySession
from tuner.study.known_costs import KnownCosts
from tuner.study.load_selection import LoadSelection
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.running_server import StatedLoad
from tuner.study.target import check_offered
from tuner.study.trial import Bench, SetupFailed
from tuner.workers.coordination import join
from tuner.workers.local_workers import device_shares, local_workers
from tuner.workers.machine import busy_share, busy_warning, visible_devices
from tuner.workers.storage import has_results

CANNOT_WRITE, INTERRUPTED = 2, 130


def run(options: Options) -> int:
    """Run or resume a study; returns the exit code. Everything but the verdict goes to stderr.

    Raises UserError.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    console = Terminal()
    try:
        return _run(StudySession.of(options), console)
    except BrokenPipeError:  # the reader of a standard stream is gone
        raise
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        cause = f"{error} (caused by {error.__cause__})" if error.__cause__ else error
        _show(console)(f"error: cannot write: {cause}")
        return 2
    except KeyboardInterrupt:
        return 130


def _run(session: StudySession, console: Console) -> int:
    job, show = session.asked.job, _show(console)
    started = not job.simulated and not job.running
    if started:
        check_offered(job, session.target(job, RUNS), show)
    if job.running:
        _permit_load(session, job, console)
    if (session.place.workers or 1) > 1:
        return _run_workers(session, console)
    if started and session.place.storage is None and (warning := busy_warning(busy_share())):
        show(warning)
    return _run_alone(session, console)


def _run_alone(session: StudySession, console: Console) -> int:
    """This process as the study's only worker, or as one of those that share its storage."""
    shared = session.place.storage is not None
    with locked(session.out, shared) as out, session.storage(out, shared) as storage:
        begun = session.begin(storage)
        job = begun.job
        target = session.target(job, out)
        if job.running and session.resumes_only and not has_results(begun.record):
            _permit_load(session, job, console)
        with (
            Interrupts() as interrupts,
            make_observer(console, f"vtune optimize: {session.name}") as observer,
            join(storage, begun.record, observer.note, interrupts) as coordination,
        ):
            watch = LoadWatch(lambda: math.inf if job.budget is None else job.budget - optimizer.clock.spent)
            kind = None if job.running else KINDS[job.server]
            bench = Bench(target, observer, interrupts, out, kind, watch)
            optimizer = Optimizer(job, bench, begun.record, coordination)
            if not (job.simulated or job.running or shared):
                optimizer.busy_share = busy_share
                optimizer.known_costs = _known_costs()
            optimizer.simulator = make_simulator(
                job.prior, job.target, job.model, observer.note, optimizer.fit_simulator
            )
            what = "resuming" if begun.resumed else "study"
            observer.note(f"{what} {session.name}: {optimizer.slo.describe()}")
            try:
                result = finish_study(optimizer)
            except KeyboardInterrupt:
                result = conclude(optimizer, optimizer.interrupted())
            except (SetupFailed, OSError, optuna.exceptions.StorageInternalError):
                observer.note(f"what was measured is kept; go on with: {session.resume_command}")
                raise
    result.show(console, session.place.json)
    if result.exit_code == INTERRUPTED or result.problem:
        _show(console)(f"go on with: {session.resume_command}")
    return CANNOT_WRITE if result.problem else result.exit_code


def _known_costs() -> KnownCosts:
    """Kept in the cache; nowhere for a user without a home."""
    try:
        return KnownCosts(cache_dir() / "study-costs.json")
    except EngineUserError:
        return KnownCosts()


def _permit_load(session: StudySession, job: Job, console: Console) -> None:
    """Say what a server that is not ours is going to be sent; ask before more than a small load.

    Raises UsageError where that is not wanted, or where it needs --yes.
    """
    target = session.target(job, RUNS)
    assert isinstance(target, EndpointTarget), "a server that runs is reached by its URL"
    selection = LoadSelection(job, parse_slo(job.slo), Bench(target, Observer(), Interrupts(), RUNS))
    stated = StatedLoad.of(selection.load(selection.untimed_profile(target.context_length())))
    if stated.small or session.place.yes:
        _show(console)(f"will send {target.name} {stated}")
        return
    if not (sys.stdin.isatty() and console.is_terminal):
        raise UsageError(
            f"--target {target.name} would be sent {stated}, which is more than is sent to a server without "
            "asking. Give --yes to send it, or leave out what asks for it for a small load."
        )
    _show(console)(f"This would send {target.name} {stated}.")
    try:
        answer = console.input("Send it? [y/N] ", markup=False)
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise UsageError(f"--target {target.name}: nothing was sent.")


def _run_workers(session: StudySession, console: Console) -> int:
    """Several workers on this machine; each does :func:`_run_alone`, and this process looks after them."""
    show = _show(console)
    devices = device_shares(visible_devices(), session.place.workers or 1)
    if devices[0] is None and not session.asked.job.simulated:
        show(
            "no GPU is visible: the workers' servers share this machine and disturb each other's measurements"
        )
    with locked(session.out) as out, session.storage(out, shared=True) as storage:
        record = session.begin(storage).record
        try:
            with (
                Interrupts(),
                local_workers(
                    session.name,
                    session.storage_url(out),
                    out,
                    devices,
                    session.start_timeout,
                    session.asked.connection,
                    show,
                ) as workers,
            ):
                statuses = workers.wait()
        except KeyboardInterrupt:
            show(f"go on with: {session.resume_command}")
            raise
        result = StudyResult.of(record)
    if result is None or max(statuses) > 1:
        show(f"error: the workers ended with {', '.join(map(str, statuses))}; their logs are in {out}")
        return max(statuses)
    try:
        result = result.brought_to(out)
    except OSError as error:
        show(f"the report stays where it is: {error}")
    result.show(console, session.place.json)
    return result.exit_code


def _show(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
