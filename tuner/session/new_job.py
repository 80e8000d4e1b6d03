"""From the options to a job, with everything checked that can be checked before a server starts."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from loadgen.plan.workload import PRESETS as WORKLOADS
from loadgen.plan.workload_file import is_file, read_workload
from loadgen.targets.simulated import gpu_defaults
from servers.command import ServerCommand, parse_command
from servers.connection import Connection
from servers.kinds import KINDS
from servers.slo.objective import parse_slo
from tuner.job.job import (
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_RUN_SECONDS,
    DEFAULT_SIMULATED_BUDGET_SECONDS,
    Job,
    UsageError,
)
from tuner.job.options import Options, Replay
from tuner.runs.replay import ReplayLoad, digest, read_replay
from tuner.search.from_doctor import read_findings
from tuner.search.prior import make_simulator
from tuner.search.strategies import AUTO, STRATEGIES
from tuner.space.file import SpaceFile, read_space_file
from tuner.space.space import SPECULATION, Surroundings, build_space, effective
from tuner.study.budget import parse_seconds
from tuner.study.regression import Recommendation, read_previous
from tuner.study.running_server import SMALL_CONCURRENCY
from tuner.study.target import check_target, started_as

RUNS = Path("vtune-runs")
"""Where studies lie, unless --out says."""
TUNERS_FLAGS = {"port", "host", "uds", *(s[2:].replace("-", "_") for k in KINDS.values() for s in k.always)}
"""Flags of a server that the tuner sets itself."""
CONTEXT_TOKENS = 1 << 15
"""Of the model, for checks before its own is known."""


@dataclass(frozen=True)
class RequestedJob:
    """What the options ask for."""

    job: Job
    stated: frozenset[str]
    """The job's fields that they name; the others are defaults, or an earlier study's."""
    connection: Connection
    """With the key that the server is started with, where its flags say one."""


def requested_job(options: Options) -> RequestedJob:
    """The job, checked. Raises UsageError, and the errors of what the options name."""
    command, key = (parse_command(options.flags) if options.flags else ServerCommand("")).without_key()
    connection = options.reached.connection
    if key is not None:
        connection = replace(connection, api_key=key, user=None, password=None)
    stated = _stated(options)
    if options.flags is not None:
        stated["flags"] = {name: value for name, value in command.flags.items() if name not in TUNERS_FLAGS}
    if options.baseline is None:
        usual = {"model": command.model or Job.model, **started_as(command, stated.get("target", Job.target))}
    else:
        previous = read_previous(options.baseline, RUNS)
        usual = _inherited(previous, stated)
        stated["baseline"] = previous.to_json()
    asked = {**usual, **stated}
    _check_load(asked)
    job = _completed(asked)
    if connection.logs_in and not job.simulated:
        job = replace(job, login="sent" if key is None or job.running else "started")
    _check(job)
    return RequestedJob(job, frozenset(stated), connection)


def _stated(options: Options) -> dict[str, Any]:
    """The job's fields that single options say; ``flags`` and ``baseline`` depend on others."""
    found = {}
    for name in (option.name for option in fields(Options)):
        value = getattr(options, name)
        if name not in ("flags", "baseline", "place", "reached") and value not in (None, Replay()):
            field = "run_seconds" if name == "run_time" else name
            found[field] = _READERS[field](value) if field in _READERS else value
    return found


def _flag_names(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.lstrip("-").replace("-", "_") for word in words)


def _vary(words: Sequence[str]) -> dict[str, tuple[Any, ...] | None]:
    """``max_num_seqs`` or ``block_size=16,32``, with dashes or underscores."""
    found: dict[str, tuple[Any, ...] | None] = {}
    for word in words:
        name, has_values, text = word.partition("=")
        (flag,) = _flag_names([name.strip()])
        values = tuple(_value(item) for item in text.split(",") if item.strip())
        if has_values and not values:
            raise UsageError(f"--vary {word}: no values after the =. Write --vary {name}=A,B.")
        found[flag] = values if has_values else None
    return found


def _value(text: str) -> Any:
    """A number or a switch where it looks like one, else the text."""
    with contextlib.suppress(ValueError):
        return json.loads(text.strip().lower())
    return text.strip()


def _loads(text: str) -> tuple[float, ...] | None:
    """``2,8,16``, rising; None for those of a replayed trace. Raises UsageError."""
    if text == AUTO:
        return None
    if text == "none":
        return ()
    try:
        levels = sorted({float(word) for word in text.split(",")})
    except ValueError:
        levels = []
    if len(levels) < 2 or not 0 < levels[0] <= levels[-1] < math.inf:
        raise UsageError(
            f"--loads {text}: give two levels or more, e.g. 2,8,16 (requests/s; with --concurrency requests "
            "in flight), or auto for those of a replayed trace, or none."
        )
    return tuple(levels)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "slo": lambda text: parse_slo(text).text,
    "replay": Replay.to_json,
    "loads": _loads,
    "budget": lambda text: parse_seconds(text, "--budget"),
    "run_seconds": lambda text: parse_seconds(text, "--run-time"),
    "fix": _flag_names,
    "vary": _vary,
    "space": read_space_file,
    "from_doctor": read_findings,
}
"""Fields of the job that have another form than their options."""


def _inherited(previous: Recommendation, stated: Collection[str]) -> dict[str, Any]:
    """An earlier study's job, as far as it is asked again; of its load only what today's leaves open.

    Raises UsageError.
    """
    if "flags" in stated:
        raise UsageError(
            "--flags and --baseline: the flags to start from are those that the earlier study recommended. "
            "Give one of the two."
        )
    before = Job.from_json(previous.job)
    names = ["slo", "target", "model", "run_seconds", "command", "env", "fix", "vary", "space"]
    load, arrivals = {"workload", "scale", "rate", "concurrency"}, {"rate", "concurrency"}
    if before.replay and not {"replay", *load} & set(stated):
        names.append("replay")
    elif "replay" not in stated:
        names += load - arrivals if arrivals & set(stated) else load
    return {"flags": previous.flags, **{name: getattr(before, name) for name in names}}


def _completed(asked: Mapping[str, Any]) -> Job:
    """The job with its defaults, those included that depend on the target and on the load."""
    job = Job(**asked)
    if "budget" not in asked:
        usual = DEFAULT_SIMULATED_BUDGET_SECONDS if job.simulated else DEFAULT_BUDGET_SECONDS
        job = replace(job, budget=None if job.trials else usual)
    job = replace(
        job, flags={**gpu_defaults(job.target), **job.flags}
    )  # named, for they depend on the device
    if job.replay:
        job = replace(job, replay={**job.replay, "sha256": digest(Path(job.replay["replay"]))})
    if job.simulated and SPECULATION not in job.vary:  # how many drafts are accepted, only real text can say
        job = replace(job, fix=tuple(dict.fromkeys((*job.fix, SPECULATION))))
    if job.loads and not job.replay and job.rate is None and job.concurrency is None:
        peak = job.loads[-1]  # what must hold holds there
        saturated = parse_slo(job.slo).saturated
        job = replace(job, concurrency=round(peak)) if saturated else replace(job, rate=peak)
    if job.running:
        job = _gentle(job)
    return job


def _gentle(job: Job) -> Job:
    """A server that is not ours gets a small load unless one is asked for, and none beyond the budget."""
    if job.replay is None and job.rate is None and job.concurrency is None:
        job = replace(job, concurrency=SMALL_CONCURRENCY)
    seconds = job.run_seconds or DEFAULT_RUN_SECONDS
    return replace(job, run_seconds=seconds if job.budget is None else min(seconds, job.budget))


def _check_load(asked: Mapping[str, Any]) -> None:
    """Raises UsageError for a load that contradicts itself or the SLO."""
    slo = parse_slo(asked.get("slo", Job.slo))
    for name in ("rate", "scale"):
        if (value := asked.get(name)) is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value}: must be a positive number.")
    if asked.get("rate") is not None and asked.get("concurrency") is not None:
        raise UsageError("--rate and --concurrency: a load is either open or closed. Give one of them.")
    if slo.saturated and asked.get("rate") is not None:
        raise UsageError(f"--slo {slo.text} is measured at saturation: give --concurrency, or neither.")
    workload = asked.get("workload", Job.workload)
    if workload not in WORKLOADS and not is_file(workload):
        raise UsageError(f"--workload {workload}: unknown. Known: {', '.join(WORKLOADS)}; or a JSON file.")
    if is_file(workload):
        read_workload(Path(workload))
    if asked.get("replay") is not None:
        _check_replay(asked["replay"], asked, slo.text if slo.saturated else "")


def _check_replay(replay: Mapping[str, Any], asked: Mapping[str, Any], saturated: str) -> None:
    """``saturated``: the SLO, where it is measured at saturation.

    Raises UsageError for what a trace says already, TraceError for one that cannot be read.
    """
    for name in ("rate", "workload", "scale"):
        if name in asked:
            instead = {"rate": "--rate-scale", "scale": "--length-scale"}.get(name, "one of the two")
            raise UsageError(f"--{name} and --replay: the trace says what is sent and when. Give {instead}.")
    if saturated:
        raise UsageError(
            f"--slo {saturated} is measured at saturation, and a replay (of {replay['replay']}) keeps the "
            "recorded rate: give bounds, e.g. 'itl_p99<80ms,ttft_p95<500ms', or a preset such as itl."
        )
    trace, seconds = read_replay(replay), asked.get("run_seconds") or DEFAULT_RUN_SECONDS
    load = ReplayLoad.of(
        Replay.from_json(replay), trace, asked.get("seed", Job.seed), seconds, max_model_len=sys.maxsize
    )
    _ = load.windows  # or a TraceError now, and not once a server is up; what its context allows comes later


def _check(job: Job) -> None:
    """Raises UsageError, TargetError, PriorError and SpaceError."""
    if job.strategy not in (AUTO, *STRATEGIES):
        raise UsageError(f"--strategy {job.strategy}: unknown. Known: {', '.join((AUTO, *STRATEGIES))}.")
    check_target(job)
    make_simulator(job.prior, job.target, job.model)  # or an error, before anything begins
    _check_flags(job)
    build_space(
        effective(job.flags, job.server),
        CONTEXT_TOKENS,
        fix=job.fix,
        vary=job.vary,
        around=Surroundings(job.server, longest_request=1),  # it is not known yet
        file=SpaceFile.of(job.space) if job.space else None,
    )


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
