"""``vtune optimize`` behind its options: from words to a job, its study, and a report."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console

from loadgen.plan.arrivals import ArrivalError
from loadgen.plan.workload import PRESETS as WORKLOADS
from loadgen.plan.workload import WorkloadError
from loadgen.plan.workload_file import is_file, read_workload
from loadgen.targets.simulated import PREFIX, gpu_defaults
from servers.flags.command import ServerCommand, parse_command
from servers.flags.words import FlagError
from servers.slo.bounds import SloError
from servers.slo.objective import Slo, parse_slo
from tuner.job.job import DEFAULT_BUDGET, DEFAULT_RUN_SECONDS, DEFAULT_SIMULATED_BUDGET, Job, JobError
from tuner.job.options import Replay
from tuner.output.display import Terminal, make_observer
from tuner.output.folder import OutputError, locked
from tuner.report.reproduce import vary_words
from tuner.report.study_result import Verdict, come_to_verdict, conclude
from tuner.runs.interrupts import Interrupts
from tuner.runs.replay import ReplayLoad, digest, read_replay
from tuner.search.from_doctor import FindingsError, read_findings
from tuner.search.prior import PriorError, make_simulator
from tuner.search.strategies import AUTO, STRATEGIES
from tuner.space.file import SpaceFile, read_space_file
from tuner.space.knobs import ENGINES
from tuner.space.space import SPECULATION, SpaceError, Surroundings, build_space, effective
from tuner.study.optimize import Optimizer
from tuner.study.regression import PreviousError, Recommendation, read_previous
from tuner.study.target import TargetError, check_offered, check_target, make_target, started_as
from tuner.study.trial import Bench, SetupFailed
from tuner.workers.coordination import join
from tuner.workers.local_workers import WorkersError, local_workers, shares
from tuner.workers.machine import others, visible_devices
from tuner.workers.storage import (
    Heartbeat,
    StorageError,
    create_study,
    has_job,
    has_study,
    mask,
    open_storage,
    open_study,
)

RUNS = Path("vtune-runs")
OURS = ("port", "host", "uds", "enable_metrics")
"""Flags of a server that the tuner sets itself."""
CANNOT_WRITE, INTERRUPTED = 2, 130


class UsageError(Exception):
    """Something the user wrote; the message says what, and what to write instead."""


_EXPECTED = (
    UsageError,
    TargetError,
    SloError,
    SpaceError,
    JobError,
    PreviousError,
    OutputError,
    StorageError,
    WorkersError,
    FlagError,
    SetupFailed,
    PriorError,
    FindingsError,
    WorkloadError,
    ArrivalError,
)


@dataclass(frozen=True)
class Options:
    """The command line as given: None where an option was left out."""

    slo: str | None = None
    model: str | None = None
    target: str | None = None
    flags: str | None = None
    workload: str | None = None
    scale: float | None = None
    rate: float | None = None
    concurrency: int | None = None
    budget: float | None = None
    trials: int | None = None
    run_seconds: float | None = None
    pairs: int | None = None
    fix: tuple[str, ...] | None = None
    vary: tuple[str, ...] | None = None
    space: Path | None = None
    seed: int | None = None
    strategy: str | None = None
    prior: str | None = None
    from_doctor: Path | None = None
    replay: Mapping[str, Any] | None = None
    baseline: str | None = None
    loads: str | None = None
    study: str | None = None
    storage: str | None = None
    workers: int | None = None
    out: Path | None = None
    start_timeout: float = 600.0
    as_json: bool = False

    @property
    def resumes_only(self) -> bool:
        """Whether a study is named, and nothing is said of what it should be."""
        where = ("study", "storage", "workers", "out", "start_timeout", "as_json")
        given = [f.name for f in fields(self) if f.name not in where and getattr(self, f.name) is not None]
        return self.study is not None and not given


def run(options: Options) -> int:
    """Run or resume a study; returns the exit code. Everything but the verdict goes to stderr."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    console = Terminal()
    try:
        return _run(options, console)
    except _EXPECTED as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except BrokenPipeError:  # of a standard stream: nobody reads it any more
        raise
    except (OSError, optuna.exceptions.StorageInternalError) as error:
        cause = f"{error} (caused by {error.__cause__})" if error.__cause__ else error
        console.print(f"error: cannot write: {cause}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(options: Options, console: Console) -> int:
    name = options.study or time.strftime("optimize-%Y%m%d-%H%M%S")
    if not name.isprintable():  # nor are halves of surrogates, which stand for bytes that are no UTF-8
        raise UsageError(f"--study {name!a}: not a printable name. Choose another.")
    if (
        options.resumes_only
        and options.storage is None
        and not _database(options.out or RUNS / name).is_file()
    ):
        raise _no_such_study(name, options)
    job = new_job(options)  # before anything is created, so that a typing error leaves nothing behind
    if not job.simulated and not job.running:
        check_offered(job, make_target(job, RUNS, options.start_timeout), _noter(console))
    if options.workers is not None and options.workers > 1:
        return _run_workers(options, options.workers, name, job, console)
    shared = options.storage is not None
    if not job.simulated and not job.running and not shared and (warning := others()):
        _noter(console)(warning)
    with locked(options.out or RUNS / name, shared) as out, _storage(options.storage, out) as storage:
        record, job, joined = _study(storage, name, job, options)
        target = make_target(job, out, options.start_timeout)
        with (
            Interrupts() as interrupts,
            make_observer(console, f"vtune optimize: {name}") as observer,
            join(storage, record, observer.note, interrupts) as crew,
        ):
            observer.note(f"{'resuming' if joined else 'study'} {name}: {parse_slo(job.slo).describe()}")
            bench = Bench(target, observer, interrupts, out, None if job.running else ENGINES[job.server])
            optimizer = Optimizer(job, bench, record, crew)
            optimizer.simulator = make_simulator(
                job.prior, job.target, job.model, observer.note, optimizer.sketch
            )
            try:
                verdict = come_to_verdict(name, optimizer, target)
            except KeyboardInterrupt:
                verdict = conclude(name, optimizer, target, optimizer.interrupted())
            except (SetupFailed, OSError, optuna.exceptions.StorageInternalError):
                observer.note(f"what was measured is kept; go on with: {_resume_command(name, options)}")
                raise
    verdict.show(console, options.as_json)
    if verdict.exit_code == INTERRUPTED or verdict.problem:
        console.print(f"go on with: {_resume_command(name, options)}", markup=False, soft_wrap=True)
    return CANNOT_WRITE if verdict.problem else verdict.exit_code


def _run_workers(options: Options, count: int, name: str, job: Job, console: Console) -> int:
    """As many workers on this machine; they do what :func:`_run` does, and this process looks after them."""
    devices = shares(visible_devices(), count)

    def show(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if devices[0] is None and not job.simulated:
        show(
            "no GPU is visible: the workers' servers share this machine and disturb each other's measurements"
        )
    with locked(options.out or RUNS / name) as out:
        url = options.storage or f"sqlite:///{_database(out).resolve()}"
        with _storage(url, out) as storage:
            record, job, _ = _study(storage, name, job, options)
            try:
                with (
                    Interrupts(),
                    local_workers(name, url, out, devices, options.start_timeout, show) as workers,
                ):
                    statuses = workers.wait()
            except KeyboardInterrupt:
                show(f"go on with: {_resume_command(name, options)}")
                raise
            verdict = Verdict.of(record)
    if verdict is None or max(statuses) > 1:
        show(f"error: the workers ended with {', '.join(map(str, statuses))}; their logs are in {out}")
        return max(statuses)
    try:
        verdict = verdict.brought_to(out)
    except OSError as error:
        show(f"the report stays where it is: {error}")
    verdict.show(console, options.as_json)
    return verdict.exit_code


def _study(
    storage: optuna.storages.BaseStorage, name: str, job: Job, options: Options
) -> tuple[optuna.Study, Job, bool]:
    """The study with its job; True where it was there already. Of two workers that create it, one does.

    Raises UsageError where there is none and nothing but its name was given, which is how one is resumed.
    """
    objective = parse_slo(job.slo).objective
    if options.resumes_only and not has_study(storage, name):
        raise _no_such_study(name, options)
    made = create_study(storage, name, objective)
    record = made or open_study(storage, name, objective)
    if made is None and has_job(record):
        job = resumed_job(record, options)
    record.set_user_attr("job", job.to_json())
    return record, job, made is None


def _no_such_study(name: str, options: Options) -> UsageError:
    place = mask(options.storage) if options.storage else options.out or RUNS / name
    return UsageError(
        f"--study {name}: there is no such study in {place}. Give the --out or --storage that it was begun "
        "with; or, to begin one of this name, what to optimize, e.g. --slo itl."
    )


def _database(out: Path) -> Path:
    """Of a study that has no --storage."""
    return out / "study.db"


def new_job(options: Options) -> Job:
    """The job that the options describe. Raises UsageError, SloError, SpaceError, FlagError."""
    previous = read_previous(options.baseline, RUNS) if options.baseline else None
    before = None
    if previous is not None:
        options, before = as_before(options, previous), Job.from_json(previous.job)
    command = parse_command(options.flags) if options.flags else ServerCommand("")
    target = options.target or "bundled"
    slo = parse_slo("itl" if options.slo is None else options.slo)
    for name, value in (("--rate", options.rate), ("--scale", options.scale)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value}: must be a positive number.")
    if options.rate is not None and options.concurrency is not None:
        raise UsageError("--rate and --concurrency: a load is either open or closed. Give one of them.")
    if slo.saturated and options.rate is not None:
        raise UsageError(f"--slo {slo.text} is measured at saturation: give --concurrency, or neither.")
    workload = options.workload or "mixed"
    if workload not in WORKLOADS and not is_file(workload):
        raise UsageError(f"--workload {workload}: unknown. Known: {', '.join(WORKLOADS)}; or a JSON file.")
    if is_file(workload):
        read_workload(Path(workload))
    if options.replay is not None:
        _check_replay(options, slo)
    job = Job(
        slo=slo.text,
        target=target,
        model=options.model or command.model or "bundled",
        flags={
            **gpu_defaults(target),  # named, because they depend on the device
            **{name: value for name, value in command.flags.items() if name not in OURS},
            **(previous.flags if previous else {}),
        },
        workload=workload,
        scale=options.scale,
        rate=options.rate,
        concurrency=options.concurrency,
        budget=options.budget or (None if options.trials else _default_budget(target)),
        trials=options.trials,
        run_seconds=options.run_seconds,
        pairs=options.pairs,
        space=read_space_file(options.space) if options.space else before.space if before else None,
        fix=tuple(options.fix or ()),
        vary=_vary(options.vary or ()),
        **({"command": before.command, "env": before.env} if before else started_as(command, target)),
        seed=options.seed or 0,
        strategy=options.strategy or AUTO,
        prior=options.prior or AUTO,
        from_doctor=read_findings(options.from_doctor) if options.from_doctor else (),
        replay=options.replay and {**options.replay, "sha256": digest(Path(options.replay["replay"]))},
        baseline=previous.to_json() if previous else None,
        loads=_loads(options),
    )
    if job.strategy not in (AUTO, *STRATEGIES):
        raise UsageError(f"--strategy {job.strategy}: unknown. Known: {', '.join((AUTO, *STRATEGIES))}.")
    if job.simulated and SPECULATION not in job.vary:  # how many drafts are accepted, only real text can say
        job = replace(job, fix=tuple(dict.fromkeys((*job.fix, SPECULATION))))
    check_target(job)
    make_simulator(job.prior, job.target, job.model)  # or an error, before anything begins
    if job.loads and not job.replay and job.rate is None and job.concurrency is None:
        peak = job.loads[-1]  # what must hold holds there
        job = replace(job, concurrency=round(peak)) if slo.saturated else replace(job, rate=peak)
    _check_flags(job)
    build_space(
        effective(job.flags, job.server),
        1 << 15,
        fix=job.fix,
        vary=job.vary,
        around=Surroundings(job.server, longest_request=1),  # it is not known yet
        file=SpaceFile.of(job.space) if job.space else None,
    )
    return job


def _noter(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def _check_replay(options: Options, slo: Slo) -> None:
    """Raises UsageError for what a trace says already, TraceError for one that cannot be read."""
    assert options.replay is not None, "asked for a replay"
    for name in ("rate", "workload", "scale"):
        if getattr(options, name) is not None:
            instead = {"rate": "--rate-scale", "scale": "--length-scale"}.get(name, "one of the two")
            raise UsageError(f"--{name} and --replay: the trace says what is sent and when. Give {instead}.")
    if slo.saturated:
        raise UsageError(
            f"--slo {slo.text} is measured at saturation, and a replay (of {options.replay['replay']}) keeps "
            "the recorded rate: give bounds, e.g. 'itl_p99<80ms,ttft_p95<500ms', or a preset such as itl."
        )
    replay, trace = Replay.from_json(options.replay), read_replay(options.replay)
    seconds = options.run_seconds or DEFAULT_RUN_SECONDS
    load = ReplayLoad.of(replay, trace, options.seed or 0, seconds, max_model_len=sys.maxsize)
    _ = load.windows  # or a TraceError now, and not once a server is up; what its context allows comes later


def _default_budget(target: str) -> float:
    return DEFAULT_SIMULATED_BUDGET if target.startswith(PREFIX) else DEFAULT_BUDGET


def _check_flags(job: Job) -> None:
    """Raises UsageError for a baseline that the space cannot be built around."""
    speculation = job.flags.get(SPECULATION)
    if speculation is not None and not isinstance(speculation, Mapping):
        raise UsageError(f"--flags: {SPECULATION} is {speculation!r}, but must be a JSON object.")
    baseline = effective(job.flags, job.server)
    for flag in ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"):
        if not isinstance(baseline[flag], int | float):
            raise UsageError(f"--flags: {flag} is {baseline[flag]!r}, but must be a number to be tuned.")
        if not 0 < baseline[flag] < math.inf:
            raise UsageError(f"--flags: {flag} is {baseline[flag]!r}, but must be a positive number.")


def as_before(options: Options, previous: Recommendation) -> Options:
    """What was left out, as the earlier study had it; of its load only what today's leaves open.

    Raises UsageError.
    """
    if options.flags is not None:
        raise UsageError(
            "--flags and --baseline: the flags to start from are those that the earlier study recommended. "
            "Give one of the two."
        )
    before = Job.from_json(previous.job)
    asked: dict[str, Any] = {
        name: getattr(before, name) for name in ("slo", "target", "model", "run_seconds")
    }
    asked |= {"fix": before.fix or None, "vary": vary_words(before.vary) or None}
    loads = ("workload", "scale", "rate", "concurrency")
    if all(getattr(options, name) is None for name in ("replay", *loads)) and before.replay:
        asked["replay"] = before.replay
    elif options.replay is None:
        asked |= {name: getattr(before, name) for name in ("workload", "scale")}
        if options.rate is None and options.concurrency is None:
            asked |= {name: getattr(before, name) for name in ("rate", "concurrency")}
    left_out = {name: value for name, value in asked.items() if getattr(options, name) is None}
    return replace(options, **left_out)


def resumed_job(record: optuna.Study, options: Options) -> Job:
    """The study's own job; only budget and trials may be given anew. Raises UsageError, JobError."""
    saved = record.user_attrs.get("job")
    if saved is None:
        raise UsageError(
            f"--study {record.study_name}: exists, but was not made by vtune. Choose another name."
        )
    job = Job.from_json(saved)
    asked = new_job(options).to_json()
    given = [name for name in sorted(_FIXED) if getattr(options, name) is not None]
    differing = [name for name in given if asked[name] != job.to_json()[name]]
    if differing:
        words = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
        raise UsageError(
            f"--study {record.study_name} was begun with other values of {words}. Leave them out to resume "
            "it, or choose another --study name."
        )
    if options.budget is None and options.trials is None:
        return job
    return replace(job, budget=options.budget, trials=options.trials)


_FREE = {"budget", "trials", "study", "storage", "workers", "out", "start_timeout", "as_json"}
_FIXED = {f.name for f in fields(Options)} - _FREE


def _vary(words: tuple[str, ...]) -> dict[str, tuple[Any, ...] | None]:
    """``max_num_seqs`` or ``block_size=16,32``, with dashes or underscores."""
    found: dict[str, tuple[Any, ...] | None] = {}
    for word in words:
        name, has_values, text = word.partition("=")
        flag = name.strip().lstrip("-").replace("-", "_")
        values = tuple(_value(item) for item in text.split(",") if item.strip())
        if has_values and not values:
            raise UsageError(f"--vary {word}: no values after the =. Write --vary {name}=A,B.")
        found[flag] = values if has_values else None
    return found


def _loads(options: Options) -> tuple[float, ...] | None:
    """``2,8,16``, rising; None for those of a replayed trace. Raises UsageError."""
    if options.loads in (None, "auto"):
        return None if options.replay else ()
    if options.loads == "none":
        return ()
    try:
        levels = sorted({float(word) for word in str(options.loads).split(",")})
    except ValueError:
        levels = []
    if len(levels) < 2 or not 0 < levels[0] <= levels[-1] < math.inf:
        raise UsageError(
            f"--loads {options.loads}: give two levels or more, e.g. 2,8,16 (requests/s; with --concurrency "
            "requests in flight), or auto for those of a replayed trace, or none."
        )
    return tuple(levels)


def _value(text: str) -> Any:
    """A number or a switch where it looks like one, else the text."""
    with contextlib.suppress(ValueError):
        return json.loads(text.strip().lower())
    return text.strip()


@contextlib.contextmanager
def _storage(url: str | None, out: Path) -> Iterator[optuna.storages.RDBStorage]:
    """The one that is given, for many workers; else one of this process in ``out``."""
    storage = open_storage(url, Heartbeat()) if url else open_storage(f"sqlite:///{_database(out)}")
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _resume_command(name: str, options: Options) -> str:
    words = ["vtune", "optimize", "--study", name]
    if options.out is not None:
        words += ["--out", str(options.out)]
    if options.storage is not None:
        words += ["--storage", mask(options.storage)]
    if options.workers is not None:
        words += ["--workers", str(options.workers)]
    return shlex.join(words)
