"""How a server is started, taken apart: program, model, flags, environment."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from servers.docker_run import SETTING, behind_run, run_at, taken_apart
from servers.flags.words import FlagError, Vocabulary, model_of, parse_flags, stray, vocabulary
from servers.image_variables import kind_of_image, refuse_unread, sagemaker_start, variables_of
from servers.input_file import read_input
from servers.kind import ServerKind
from servers.kinds import KINDS, VLLM, find_start
from servers.launch_file import Launch, read_launches
from servers.shell_words import is_shell, joined, quoted, split_statements

_TALKING = frozenset({"echo", "printf", "pkill", "pgrep", "grep", "man", "which", "type", "alias"})
"""Programs that may name a server's command, and start none."""


@dataclass(frozen=True)
class ServerCommand:
    """How a server is started, taken apart. ``str(command)`` puts it together again, quoted for a shell."""

    program: str
    """``vllm serve``, ``python -m sglang.launch_server``, …, a Docker image, or "" for bare flags."""
    model: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    """In vLLM's names, whichever server it is (see ``servers.flags.spelling``)."""
    env: dict[str, str] = field(default_factory=dict)
    """Of the server: with ``docker run``, what is set in the container."""
    rest: tuple[str, ...] = ()
    """The words before the program: ``docker run --gpus all``, ``taskset -c 0-3``, ``uv run``."""
    from_file: frozenset[str] = frozenset()
    """Those of ``flags`` that a ``--config FILE`` says, and the command itself does not."""

    @property
    def kind(self) -> ServerKind | None:
        """Whose flags these are; None when the command does not say. An image without a name that is known is
        taken for vLLM's."""
        if not self.program:
            return None
        if start := find_start(shlex.split(self.program)):
            return start.kind
        return kind_of_image(self.program) or VLLM

    @property
    def version(self) -> str | None:
        """The release that the command names, in an image's tag or for an installer; None: it does not."""
        name = self.kind.program if self.kind else ""
        for word in (self.program, *self.rest):
            if name and (match := re.search(rf"{name}\S*?(?::v?|==)(\d+\.\d+(?:\.\d+)*)", word)):
                return match[1]
        return None

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
        return [
            *self.rest,
            *shlex.split(self.program),
            *model,
            *kind.spelling.render(self.flags, kind.offered(self.version)),
        ]

    def __str__(self) -> str:
        words, env = self.words(), [f"{name}={quoted(value)}" for name, value in self.env.items()]
        at, run = 0, run_at(self.rest)
        if run is not None:
            at, env = behind_run(self.rest, run), [word for setting in env for word in ("-e", setting)]
        elif self.rest and (self.rest[0] == "sudo" or self.rest[-1] == "env"):
            at = len(self.rest)
        return " ".join([*map(quoted, words[:at]), *env, *map(quoted, words[at:])])


def parse_command(text: str) -> ServerCommand:
    """Read a server command, or bare flags, as one would type them.

    Understands ``VAR=x vllm serve M …``, ``vtune serve M …``, ``docker run … IMAGE …``,
    ``python -m vllm.entrypoints.openai.api_server …`` and ``python -m sglang.launch_server …``, also among
    other statements, within ``bash -c '…'``, and in what :mod:`servers.launch_file` reads; ``@FILE`` for a
    file that holds any of them. ``--flag value``, ``--flag=value``, dashes or underscores, ``--no-flag``,
    abbreviations that argparse takes, JSON values, ``--config.key value``, ``--config FILE``. Variables that
    the text itself sets are filled in (:mod:`servers.shell_words`). Of a repeated flag the last one counts.

    Raises FlagError for what cannot be read, and for what only a run would tell.
    """
    if text.startswith("@"):
        text = _read(text[1:], "the file with the command")
    launches = read_launches(text)
    if launches is None:
        launches = [Launch(each.words, each.env) for each in split_statements(text)]
        if not launches:
            raise FlagError("the command is empty: write e.g. 'vllm serve MODEL --max-num-seqs 64'")
    found = _chosen(launches)
    if found is None:
        known = ", ".join(f"'{kind.command} MODEL …'" for kind in KINDS.values())
        raise FlagError(
            f"no server is named in {text.strip()[:120]!r}: write {known}, "
            "'python -m vllm.entrypoints.openai.api_server …', 'docker run … IMAGE …', or only the flags"
        )
    return _parsed(found)


@dataclass(frozen=True)
class _Start:
    """A server's start among a command's words: see ``ServerCommand``."""

    rest: tuple[str, ...]
    program: str
    words: list[str]
    """Behind the program."""
    env: dict[str, str]
    name: str = ""
    certain: bool = True
    """False: an image that may hold anything, with flags."""


def _chosen(launches: Iterable[Launch]) -> _Start | None:
    """The only one of several statements, or services, that starts a server; None: none does."""
    starts = [start for launch in launches if (start := _start_of(launch)) is not None]
    starts = [start for start in starts if start.certain] or starts
    if len(starts) > 1:
        names = ", ".join(
            start.name or joined([*start.rest, *shlex.split(start.program), *start.words])[:40]
            for start in starts
        )
        raise FlagError(f"several servers are started there ({names}): give the command of one")
    return starts[0] if starts else None


def _start_of(launch: Launch) -> _Start | None:
    words = ["docker", "run", launch.image, *launch.words] if launch.image else launch.words
    if not words or words[0] in _TALKING:
        return None
    if words[0].startswith("-"):
        return _Start((), "", words, launch.env, launch.name)
    start, run, script = find_start(words), run_at(words), _script(words)
    if run is not None and (start is None or run < start.begin):
        return _in_container(words, run, launch)
    if script is not None and (start is None or script < start.begin):
        found = _chosen(Launch(each.words, each.env) for each in split_statements(words[script], launch.env))
        if found is None:
            return None
        shell = max(at for at in range(script) if is_shell(words[at]))
        return replace(
            found, rest=(*words[:shell], *found.rest), env={**launch.env, **found.env}, name=launch.name
        )
    if start is None:
        return None
    rest, env = words[: start.begin], dict(launch.env)
    while rest and (match := SETTING.fullmatch(rest[-1])):  # of "sudo A=b vllm serve"
        env[match[1]] = match[2]
        rest = rest[:-1]
    program = joined(words[start.begin : start.end])
    return _Start(tuple(rest), program, words[start.end :], env, launch.name)


def _in_container(words: list[str], run: int, launch: Launch) -> _Start | None:
    docker = taken_apart(words, run)
    env = {**launch.env, **docker.env}
    before = (*docker.begin, *docker.options)
    if docker.words and not docker.words[0].startswith("-"):
        inside = _start_of(Launch(docker.words, env))
        if inside is not None:
            return replace(inside, rest=(*before, docker.image, *inside.rest), name=launch.name)
        if _script(docker.words) is not None:
            return None
    elif begun := find_start(["", *docker.words]):  # the image's own program is Python
        program, own = docker.words[: begun.end - 1], docker.words[begun.end - 1 :]
        return _Start((*before, docker.image), joined(program), own, env, launch.name)
    if made := sagemaker_start(docker.image, env, docker.words):
        kind, own = made
        kept = {name: value for name, value in env.items() if not name.startswith(variables_of(kind))}
        return _Start((*before, "--entrypoint=", docker.image), kind.command, own, kept, launch.name)
    kind_named = kind_of_image(docker.image) is not None
    if not kind_named and not "".join(docker.words[:1]).startswith("-"):
        return None
    return _Start(before, docker.image, docker.words, env, launch.name, kind_named)


def _script(words: Sequence[str]) -> int | None:
    """Index of the text that a shell is given: of ``bash -c '…'``."""
    for at in range(2, len(words)):
        options = words[at - 1]
        if re.fullmatch(r"-[a-z]*c", options) and any(is_shell(word) for word in words[: at - 1]):
            return at
    return None


def _parsed(found: _Start) -> ServerCommand:
    command = ServerCommand(found.program, env=found.env, rest=found.rest)
    kind = command.kind or VLLM
    spelling, known = kind.spelling, vocabulary(kind.name, command.version)
    own, positional = parse_flags(found.words, known, spelling.many)
    _refuse_misspelt(own, known, kind)
    program = shlex.split(found.program)
    if program and find_start(program) is None and kind_of_image(found.program) is None:
        _refuse_strangers(found.program, own, known)
    flags = spelling.from_own(own)
    if program and find_start(program) is None:
        refuse_unread(found.program, found.env, flags)
    settled: dict[str, Any] = {}
    if isinstance(file := flags.pop("config", None), str) and kind is VLLM:
        settled = {name: value for name, value in _settings(file).items() if name not in flags}
        flags = {**settled, **flags}
    elif file is not None:
        flags["config"] = file
    model = flags.pop("model", None)
    told = None if settled.pop("model", None) else model
    if positional:
        if not program or "-m" in program or told not in (None, positional[0]):
            raise stray(positional[0])
        model = model_of(positional.pop(0))
    if positional:
        raise stray(positional[0])
    return replace(command, model=model, flags=flags, from_file=frozenset(settled))


def _refuse_misspelt(own: Mapping[str, Any], known: Vocabulary, kind: ServerKind) -> None:
    """A flag that no release has, but for a letter or two: the server would have refused it, too."""
    for name in own if known.spelled else ():
        if name not in known.kinds and (
            near := difflib.get_close_matches(name, known.kinds, n=1, cutoff=0.8)
        ):
            raise FlagError(
                f"--{name.replace('_', '-')}: {kind.label} has no such flag. "
                f"Is --{near[0].replace('_', '-')} meant?"
            )


def _refuse_strangers(image: str, flags: Mapping[str, Any], known: Vocabulary) -> None:
    """An image that may hold anything is vLLM's where it takes vLLM's flags."""
    for name in flags:
        if name not in known.kinds:
            raise FlagError(
                f"the image {image!r} takes --{name.replace('_', '-')}, which vLLM does not. Which server is "
                "it? Write the command that the image runs behind it, as 'docker run … IMAGE vllm serve M …'"
            )


def _settings(file: str) -> dict[str, Any]:
    """The flags of vLLM's ``--config FILE``. Raises FlagError."""
    import yaml

    try:
        given = yaml.safe_load(_read(file, "--config"))
    except yaml.YAMLError as error:
        raise FlagError(f"--config {file}: is not YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(given, dict):
        raise FlagError(f"--config {file}: must hold one mapping of flags to values")
    words = []
    for name, value in given.items():
        option = "--" + str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is not None:
            words.append(f"{option}={json.dumps(value) if isinstance(value, dict) else value}")
    return parse_flags(words, vocabulary(VLLM.name))[0]


def _read(path: str, what: str) -> str:
    try:
        return read_input(Path(path).expanduser()).decode(errors="replace")
    except OSError as error:
        raise FlagError(
            f"{what} {path}: cannot be read here ({error.strerror}). Run where it lies, or give its flags"
        ) from None
