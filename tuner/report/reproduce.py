"""A job as the command that does it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from loadgen.commands.options import Recorded
from servers.kinds import BUNDLED, KINDS
from tuner.job.job import Job
from tuner.job.options import option_of

_SECONDS = ("budget", "run_seconds")
_ELSEWHERE = ("command", "env", "login")
"""Fields that are told by other options."""
_ALWAYS = ("slo", "target", "model")
"""Given even where they are the defaults: they say what the study was about."""


def command_of(job: Job, rate: float | None = None, concurrency: int | None = None) -> str:
    """``vtune optimize …`` with everything that the job was asked, for a shell.

    ``rate`` and ``concurrency`` are the load that was found, where the job did not say.
    """
    words = ["vtune", "optimize"]
    asked = {field.name: getattr(job, field.name) for field in fields(Job)}
    asked = {name: value for name, value in asked.items() if name not in _ELSEWHERE} | {"flags": _flags(job)}
    if not job.replay and job.rate is None and job.concurrency is None:
        asked |= {"rate": None if rate is None else float(f"{rate:.4g}"), "concurrency": concurrency}
    if job.baseline:  # which says the flags
        asked["flags"] = ""
    usual = {**{field.name: getattr(Job(), field.name) for field in fields(Job)}, "flags": ""}
    for name, value in asked.items():
        if name in _ALWAYS or value != usual[name]:
            words += _option(name, value)
    return shlex.join([*words, *(["--api-key-file", "FILE"] if job.login else [])])


def _flags(job: Job) -> str:
    """As the user gave them: with the environment and the program, where these were used."""
    env = [f"{name}={shlex.quote(value)}" for name, value in job.env.items()]
    program = job.command or ("vtune serve" if env else "")
    kind = KINDS[job.server] if job.command else BUNDLED  # bare flags are in vLLM's names
    return " ".join([*env, *filter(None, [program, shlex.join(kind.spelling.render(job.flags))])])


def _option(name: str, value: Any) -> list[str]:
    option = option_of(name)
    if name == "space":
        return [option, value["file"]] if value else []
    if name == "replay":
        return _replay(value) if value else []
    if name == "baseline":
        return [option, str(value["where"])] if value else []
    if name == "vary":
        return [word for item in _vary_words(value) for word in (option, item)]
    if name == "loads":
        return [option, "auto" if value is None else ",".join(f"{load:g}" for load in value) or "none"]
    if name in _SECONDS:
        return [] if value is None else [option, f"{value:g}s"]
    if isinstance(value, tuple | list):
        return [word for item in value for word in (option, str(item))]
    if isinstance(value, bool):
        return [option] if value else []
    return [] if value is None else [option, str(value)]


def _vary_words(vary: Mapping[str, tuple[Any, ...] | None]) -> tuple[str, ...]:
    """As ``--vary`` takes them: ``max_num_seqs``, ``block_size=16,32``."""
    return tuple(
        flag if values is None else f"{flag}={','.join(map(_written, values))}"
        for flag, values in vary.items()
    )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _replay(data: Mapping[str, Any]) -> list[str]:
    words = ["--replay", str(data["replay"])]
    for field in fields(Recorded):
        value = data[field.name]
        if value != field.default:
            text = ",".join(f"{edge:g}s" for edge in value) if isinstance(value, list | tuple) else str(value)
            words += [f"--{field.name.replace('_', '-')}", text]
    return words
