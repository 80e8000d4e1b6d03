"""``docker run``, taken apart: its options, what it sets in the container, the image, what the image runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from servers.flags.words import FlagError

_PROGRAMS = ("docker", "podman", "nerdctl")
_SWITCHES = re.compile(
    "--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|no-healthcheck|quiet|sig-proxy"
    "|oom-kill-disable|disable-content-trust)"
)
_SHORT = re.compile(r"-[ditPq]*([^-ditPq])?(.*)", re.DOTALL)
"""Switches, and at their end an option, which may have its value attached."""
SETTING = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class DockerRun:
    begin: tuple[str, ...]
    """The words up to ``run``."""
    options: tuple[str, ...]
    """Those before the image, without the variables that they set."""
    env: dict[str, str]
    image: str
    words: list[str]
    """Behind the image, its entry point first where one is given."""


def run_at(words: Sequence[str]) -> int | None:
    """Index of the ``docker`` in ``docker run`` and ``docker container run``."""
    for at, (word, following) in enumerate(pairwise(words)):
        if word.rsplit("/", 1)[-1] in _PROGRAMS and following in ("run", "create", "container"):
            return at
    return None


def behind_run(words: Sequence[str], at: int) -> int:
    """Index of the first option of a ``docker run`` that stands at ``at``."""
    return at + 2 + (words[at + 1] == "container")


def taken_apart(words: Sequence[str], at: int) -> DockerRun:
    """A ``docker run`` that stands at ``at``. Raises FlagError where it names no image."""
    begin = here = behind_run(words, at)
    options: list[str] = []
    env: dict[str, str] = {}
    entrypoint: list[str] = []
    while here < len(words) and words[here].startswith("-"):
        name, value, width = _option(words, here)
        setting = SETTING.fullmatch(value) if value and name in ("-e", "--env") else None
        if setting:
            env[setting[1]] = setting[2]
        elif name == "--entrypoint" and value:
            entrypoint = [value]
            options.append("--entrypoint=")
        else:
            options += words[here : here + width]
        here += width
    if here >= len(words):
        raise FlagError(
            "'docker run' names no image: write 'docker run [options] vllm/vllm-openai --model M …'"
        )
    after = [*entrypoint, *words[here + 1 :]]
    return DockerRun(tuple(words[:begin]), tuple(options), env, words[here], after)


def _option(words: Sequence[str], at: int) -> tuple[str, str | None, int]:
    """(name, value, number of its words) of the option at ``at``."""
    word = words[at]
    following = words[at + 1] if at + 1 < len(words) else None
    if word.startswith("--"):
        name, joined, value = word.partition("=")
        if joined or _SWITCHES.fullmatch(word):
            return name, value, 1
        return name, following, 2
    match = _SHORT.fullmatch(word)
    name, value = (match[1] or "", match[2]) if match else ("", "")
    if not name:
        return word, None, 1
    return f"-{name}", value.removeprefix("=") or following, 1 if value else 2
