"""How a server is started, taken apart: program, model, flags, environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from servers.flags.words import FlagError, parse_flags, split_words, stray
from servers.kind import ServerKind
from servers.kinds import KINDS, VLLM, find_start

_ENV = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DOCKER_SWITCHES = re.compile(
    "-[ditP]+|--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|no-healthcheck|quiet)"
)


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started, taken apart. ``str(command)`` puts it together again, quoted for a shell."""

    program: str
    """``vllm serve``, ``python -m sglang.launch_server``, …, a Docker image, or "" for bare flags."""
    model: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    """In vLLM's names, whichever server it is (see ``servers.flags.spelling``)."""
    env: dict[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    """The words before the program: ``docker run --gpus all``, ``taskset -c 0-3``, ``uv run``."""

    @property
    def kind(self) -> ServerKind | None:
        """Whose flags these are; None when the command does not say. An image is taken for vLLM's."""
        if not self.program:
            return None
        start = find_start(shlex.split(self.program))
        return start.kind if start else VLLM

    def with_flags(self, changes: Mapping[str, Any]) -> ServerCommand:
        """The same command with ``changes`` laid over its flags; a value of None drops the flag."""
        merged = {**self.flags, **changes}
        return replace(self, flags={name: value for name, value in merged.items() if value is not None})

    def without_key(self) -> tuple[ServerCommand, str | None]:
        """The same command without the API key that it says in a flag or a variable, and that key."""
        flags, env = dict(self.flags), dict(self.env)
        in_flags, variable = flags.pop("api_key", None), self.kind.key_variable if self.kind else ""
        in_env = env.pop(variable, None) if variable else None
        key = in_flags[0] if isinstance(in_flags, list) and in_flags else in_flags
        return replace(self, flags=flags, env=env), in_env if key is None else str(key)

    def words(self) -> list[str]:
        """The command without its environment, as an argument vector. Raises FlagError."""
        kind = self.kind or VLLM
        model: list[str] = []
        if self.model is not None:
            option = "--" + kind.spelling.own("model").replace("_", "-")
            bare = kind.positional_model and self.program.endswith(kind.serve[-1])
            model = [self.model] if bare else [option, self.model]
        return [*self.rest, *shlex.split(self.program), *model, *kind.spelling.render(self.flags)]

    def __str__(self) -> str:
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, shlex.join(self.words())])


def parse_command(text: str) -> ServerCommand:
    """Read a server command, or bare flags, as one would type them.

    Understands ``VAR=x vllm serve M …``, ``vtune serve M …``, ``docker run … IMAGE …``,
    ``python -m vllm.entrypoints.openai.api_server …`` and ``python -m sglang.launch_server …``;
    ``--flag value``, ``--flag=value``, dashes or underscores, ``--no-flag``, JSON values,
    ``--config.key value``, lines continued by a backslash. Of a repeated flag the last one counts. What
    follows a pipe, a redirection or ``&`` is left out. Raises FlagError.
    """
    env, words = split_words(text)
    if not words:
        raise FlagError("the command is empty: write e.g. 'vllm serve MODEL --max-num-seqs 64'")
    rest, program, words = _find_program(words, text)
    while rest and (match := _ENV.fullmatch(rest[-1])):
        env[match[1]] = match[2]
        rest = rest[:-1]
    command = ServerCommand(program, env=env, rest=tuple(rest))
    spelling = (command.kind or VLLM).spelling
    own, positional = parse_flags(words, spelling.many)
    flags = spelling.from_own(own)
    model = flags.pop("model", None)
    if positional:
        if not program or " -m " in program:
            raise stray(positional[0])
        model = positional.pop(0)
    if positional:
        raise stray(positional[0])
    return replace(command, model=model, flags=flags)


def _find_program(words: list[str], text: str) -> tuple[list[str], str, list[str]]:
    """(words before the program, the program, the words after it)."""
    if words[0].startswith("-"):
        return [], "", words
    start, runs = find_start(words), _docker_run(words)
    if runs is not None and (start is None or runs < start.begin):
        image = _docker_image(words, runs + 2)
        return words[:image], words[image], words[image + 1 :]
    if start is not None:
        return words[: start.begin], shlex.join(words[start.begin : start.end]), words[start.end :]
    known = ", ".join(f"'{kind.command} MODEL …'" for kind in KINDS.values())
    raise FlagError(
        f"no server is named in {text.strip()[:120]!r}: write {known}, "
        "'python -m vllm.entrypoints.openai.api_server …', 'docker run … IMAGE …', or only the flags"
    )


def _docker_run(words: list[str]) -> int | None:
    """Index of the ``docker`` in ``docker run``."""
    for at, (word, following) in enumerate(pairwise(words)):
        if word.rsplit("/", 1)[-1] in ("docker", "podman") and following == "run":
            return at
    return None


def _docker_image(words: list[str], at: int) -> int:
    """Index of the image: the first word after ``docker run`` that is no option and no option's value."""
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            return at
        at += 1 if _DOCKER_SWITCHES.fullmatch(word) or "=" in word else 2
    raise FlagError("'docker run' names no image: write 'docker run [options] vllm/vllm-openai --model M …'")
