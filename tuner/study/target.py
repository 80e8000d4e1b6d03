"""From what ``--target`` and ``--flags`` say to something that opens, and whether it takes what is asked."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadgen.target import Target
from loadgen.targets.endpoint import EndpointTarget
from loadgen.targets.server import ServerTarget
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError
from loadgen.wire.probe import UrlError
from servers.command import ServerCommand
from servers.connection import NO_LOGIN, Connection, masked
from servers.errors import UserError
from servers.kinds import BUNDLED, KINDS
from tuner.job.job import Job
from tuner.job.launch import BUNDLED_HUB_ID
from tuner.space.file import SpaceFile
from tuner.space.knobs import Surroundings
from tuner.space.space import build_space, effective


class TargetError(UserError):
    """``--target`` or ``--flags`` cannot be used. The message says why, and what to write."""


def started_as(command: ServerCommand, target: str) -> dict[str, Any]:
    """The fields of a job that say how ``--flags`` starts a server of the target's kind.

    The bundled engine is always this package's own. What a container maps is its author's to say, so of
    ``docker run`` only the flags are taken.
    """
    if command.kind is None or command.kind.name != target or "run" in command.rest[:2]:
        return {}
    found: dict[str, Any] = {"env": dict(command.env)}
    if target != "bundled":
        bare = ServerCommand(command.program, command.model, rest=command.rest)
        found["command"] = shlex.join(bare.words())
    return found


def make_target(job: Job, out: Path, start_timeout: float, connection: Connection = NO_LOGIN) -> Target:
    """Raises TargetError for a simulation of something unknown and for a URL that is none."""
    if job.simulated:
        try:
            return SimulatedTarget(
                job.target, job.model, calibrating=lambda text: print(text, file=sys.stderr)
            )
        except SimulatedTargetError as error:
            raise TargetError(f"--target {job.target}: {error}") from None
    if job.running:
        model = "" if job.model == "bundled" else job.model
        try:
            return EndpointTarget(job.target, flags=job.flags, model=model, connection=connection)
        except UrlError as error:
            raise TargetError(f"--target {job.target}: {error}") from None
    settings: dict[str, Any] = {
        "log_dir": out / "logs",
        "start_timeout": start_timeout,
        "env": job.env,
        "connection": connection,
        "server_key": connection.api_key if job.login == "started" else None,
    }
    kind = KINDS.get(job.target)
    if kind is None:
        return ServerTarget(job.target, **settings)
    elsewhere = job.model == "bundled" and kind is not BUNDLED
    return ServerTarget.of(kind, BUNDLED_HUB_ID if elsewhere else job.model, command=job.command, **settings)


def check_target(job: Job) -> None:
    """Raises TargetError for a target that is unknown, or that sets itself what is to be varied, or a key."""
    target = job.target
    if masked(target) != target:
        raise TargetError(
            f"--target {masked(target)!r}: a study stores its target, and no key. Give the server's key as "
            "--api-key in --flags, which is not stored; what is in the environment is handed down."
        )
    if target in KINDS or job.simulated or job.running:
        return
    if "{flags}" not in target:
        raise TargetError(
            f"--target {target!r}: unknown. Give {', '.join(KINDS)}, or a command with {{flags}} where "
            "the flags go, e.g. 'my-server --model M {flags} --port {port}'; the URL of a server that runs, "
            "to measure and diagnose it; or simulated:h100 to measure nothing."
        )
    around = Surroundings(job.server)
    for flag in effective({}, job.server):
        for name in dict.fromkeys((flag, around.spelling(flag))):
            if re.search(rf"--{name.replace('_', '[-_]')}\b", target):
                raise TargetError(
                    f"--target sets --{name.replace('_', '-')} itself: move it to --flags, the baseline."
                )


def check_offered(job: Job, target: Target, note: Callable[[str], None]) -> None:
    """Hold the job's flags and space against what the target's program takes, by its own help.

    Raises TargetError and SpaceError; a program that cannot be asked is believed.
    """
    if isinstance(target, ServerTarget) and target.kind is not None and target.kind.help_cached:
        note("reading which flags the server takes (once for each version)")
    offered = target.offered_flags()
    if offered is None:
        return
    around = Surroundings(job.server, longest_request=1, offered=offered)  # of requests nothing is known yet
    for flag in job.flags:
        if around.spelling(flag) not in offered:
            near = offered.near(around.spelling(flag))
            raise TargetError(
                f"--flags: {around.program} has no --{around.spelling(flag).replace('_', '-')}"
                + (f" (did you mean --{near.replace('_', '-')}?)" if near else "")
                + ". Leave it out."
            )
    file = SpaceFile.of(job.space) if job.space else None
    baseline = effective(job.flags, job.server)
    build_space(baseline, 1 << 15, fix=job.fix, vary=job.vary, around=around, file=file)
