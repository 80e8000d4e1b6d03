"""How a server is started, taken apart: program, model, flags, environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from servers.flags.sglang_flags import from_sglang, render_sglang
from servers.flags.words import FlagError, parse_flags, render, split_words, stray

_ENV = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SGLANG = re.compile(r"(^|[/ ])sglang( serve$|\.)")
_DOCKER_SWITCHES = re.compile(
    "-[ditP]+|--(detach|interactive|tty|rm|init|privileged|read-only|publish-all|no-healthcheck|quiet)"
)


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started, taken apart. ``str(command)`` puts it together again, quoted for a shell."""

    program: str
    """``vllm serve``, ``vtune serve``, ``python -m vllm.entrypoints.openai.api_server``,
    ``python -m sglang.launch_server``, a Docker image, or "" for bare flags."""
    model: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    """In vLLM's names, whosever server it is (see ``servers.flags.sglang_flags``)."""
    env: dict[str, str] = field(default_factory=dict)
    rest: tuple[str, ...] = ()
    """The words before the program: ``docker run --gpus all``, ``taskset -c 0-3``, ``uv run``."""

    @property
    def engine(self) -> Literal["vllm", "vtune", "sglang", ""]:
        """Whose flags these are; "" when the command does not say."""
        if not self.program:
            return ""
        if _SGLANG.search(self.program):
            return "sglang"
        return "vtune" if self.program.endswith("vtune serve") else "vllm"

    def with_flags(self, changes: Mapping[str, Any]) -> ServerCommand:
        """The same command with ``changes`` laid over its flags; a value of None drops the flag."""
        merged = {**self.flags, **changes}
        return replace(self, flags={name: value for name, value in merged.items() if value is not None})

    def words(self) -> list[str]:
        """The command without its environment, as an argument vector. Raises FlagError."""
        if self.engine == "sglang":
            named = [] if self.model is None else ["--model-path", self.model]
            return [*self.rest, *shlex.split(self.program), *named, *render_sglang(self.flags)]
        model: list[str] = []
        if self.model is not None:
            model = [self.model] if self.program.endswith("serve") else ["--model", self.model]
        return [*self.rest, *shlex.split(self.program), *model, *render(self.flags)]

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
    flags, positional = parse_flags(words)
    if _SGLANG.search(program):
        flags = from_sglang(flags)
        flags["model"] = flags.pop("model_path", None)
    model = flags.pop("model", None)
    if positional:
        if not program.endswith("serve") and not (rest and rest[0] in ("docker", "podman")):
            raise stray(positional[0])
        model = positional.pop(0)
    if positional:
        raise stray(positional[0])
    return ServerCommand(program=program, model=model, flags=flags, env=env, rest=tuple(rest))


def _find_program(words: list[str], text: str) -> tuple[list[str], str, list[str]]:
    """(words before the program, the program, the words after it)."""
    if words[0].startswith("-"):
        return [], "", words
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        name = word.rsplit("/", 1)[-1]
        if name in ("vllm", "vtune", "sglang") and following == "serve":
            return words[:at], f"{shlex.quote(word)} serve", words[at + 2 :]
        if word == "-m" and following.startswith(("vllm.entrypoints.", "sglang.")) and at > 0:
            return words[: at - 1], f"{shlex.quote(words[at - 1])} -m {following}", words[at + 2 :]
        if name in ("docker", "podman") and following == "run":
            image = _docker_image(words, at + 2)
            return words[:image], words[image], words[image + 1 :]
    raise FlagError(
        f"no server is named in {text.strip()[:120]!r}: write 'vllm serve MODEL …', 'vtune serve MODEL …', "
        "'python -m vllm.entrypoints.openai.api_server …', 'python -m sglang.launch_server …', "
        "'docker run … IMAGE …', or only the flags"
    )


def _docker_image(words: list[str], at: int) -> int:
    """Index of the image: the first word after ``docker run`` that is no option and no option's value."""
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            return at
        at += 1 if _DOCKER_SWITCHES.fullmatch(word) or "=" in word else 2
    raise FlagError("'docker run' names no image: write 'docker run [options] vllm/vllm-openai --model M …'")
