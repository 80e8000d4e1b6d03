"""How a server is started, taken apart: program, model, flags, environment."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from servers.flags.words import FlagError, Vocabulary, parse_flags, split_statements, stray, vocabulary
from servers.input_file import read_input
from servers.kind import ServerKind
from servers.kinds import KINDS, VLLM, find_start
from servers.launch_file import read_launches

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|\((\w+)\)|(\w+))")
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
        return [*self.rest, *shlex.split(self.program), *model, *kind.spelling.render(self.flags)]

    def __str__(self) -> str:
        env = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " ".join([*env, shlex.join(self.words())])


def parse_command(text: str) -> ServerCommand:
    """Read a server command, or bare flags, as one would type them.

    Understands ``VAR=x vllm serve M …``, ``vtune serve M …``, ``docker run … IMAGE …``,
    ``python -m vllm.entrypoints.openai.api_server …`` and ``python -m sglang.launch_server …``, also among
    other statements, within ``bash -c '…'``, and in what :mod:`servers.launch_file` reads; ``@FILE`` for a
    file that holds any of them. ``--flag value``, ``--flag=value``, dashes or underscores, ``--no-flag``,
    abbreviations that argparse takes, JSON values, ``--config.key value``, ``--config FILE``, ``${X:-64}``,
    lines continued by a backslash. Of a repeated flag the last one counts. What follows a pipe, a redirection
    or ``&`` is left out. Raises FlagError.
    """
    if text.startswith("@"):
        text = _read(text[1:], "the file with the command")
    launches = read_launches(text)
    if launches is None:
        return _chosen(text, [(env, words, "") for env, words in split_statements(text)])
    told = [
        (
            launch.env,
            ["docker", "run", launch.image, *launch.words] if launch.image else launch.words,
            launch.name,
        )
        for launch in launches
    ]
    return _chosen(text, told)


def _chosen(text: str, told: Sequence[tuple[dict[str, str], list[str], str]]) -> ServerCommand:
    """The only one of several statements, or services, that starts a server."""
    if told and not any(words for _, words, _ in told):
        raise FlagError("the command is empty: write e.g. 'vllm serve MODEL --max-num-seqs 64'")
    plain = ((env, _with_entrypoint(words), name) for env, words, name in told)
    starting = [(env, words, name) for env, words, name in plain if _names_server(words)]
    if len(starting) > 1:
        names = ", ".join(name or shlex.join(words)[:40] for _, words, name in starting)
        raise FlagError(f"several servers are started there ({names}): give the command of one")
    if not starting:
        known = ", ".join(f"'{kind.command} MODEL …'" for kind in KINDS.values())
        raise FlagError(
            f"no server is named in {text.strip()[:120]!r}: write {known}, "
            "'python -m vllm.entrypoints.openai.api_server …', 'docker run … IMAGE …', or only the flags"
        )
    env, words, _ = starting[0]
    return _parsed(env, words)


def _names_server(words: Sequence[str]) -> bool:
    if not words:
        return False
    if words[0].startswith("-") or find_start(words) is not None:
        return True
    if _inner(words) is not None:
        return True
    runs = _docker_run(words)
    if runs is None:
        return False
    image = _docker_image(words, runs + 2)
    return kind_of_image(words[image]) is not None or "".join(words[image + 1 : image + 2]).startswith("-")


def _inner(words: Sequence[str]) -> int | None:
    """Index of a word that is a shell text of its own in which a server is started: of ``bash -c '…'``."""
    for at, word in enumerate(words):
        if (
            at
            and words[at - 1] in ("-c", "-lc", "-ec", "-xc")
            and any(_names_server(own) for _, own in split_statements(word))
        ):
            return at
    return None


def _parsed(env: dict[str, str], words: list[str]) -> ServerCommand:
    if (shell := _inner(words)) is not None:
        found = parse_command(words[shell])
        return replace(found, env={**env, **found.env}, rest=(*words[: shell - 1], *found.rest))
    rest, program, words = _find_program(words)
    while rest and (match := _ENV.fullmatch(rest[-1])):
        env[match[1]] = match[2]
        rest = rest[:-1]
    words = [
        _VARIABLE.sub(lambda match: env.get(next(filter(None, match.groups())), match[0]), word)
        for word in words
    ]
    command = ServerCommand(program, env=env, rest=tuple(rest))
    kind = command.kind or VLLM
    spelling, known = kind.spelling, vocabulary(kind.name, command.version)
    own, positional = parse_flags(words, known, spelling.many)
    _refuse_misspelt(own, known, kind)
    if program and find_start(shlex.split(program)) is None and kind_of_image(program) is None:
        _refuse_strangers(program, own, known)
    flags = spelling.from_own(own)
    settled: dict[str, Any] = {}
    if isinstance(file := flags.pop("config", None), str) and kind is VLLM:
        settled = {name: value for name, value in _settings(file).items() if name not in flags}
        flags = {**settled, **flags}
    elif file is not None:
        flags["config"] = file
    model = flags.pop("model", None)
    settled.pop("model", None)
    if positional:
        if not program or " -m " in program:
            raise stray(positional[0])
        model = positional.pop(0)
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


def kind_of_image(image: str) -> ServerKind | None:
    """The kind whose program an image is named after; None: it may hold anything."""
    return next((kind for kind in KINDS.values() if kind.program in image), None)


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


def _with_entrypoint(words: list[str]) -> list[str]:
    """``docker run --entrypoint X IMAGE …`` as the same without an entry point, X behind the image."""
    runs = _docker_run(words)
    if runs is None:
        return words
    for at in range(runs, len(words)):
        name, _, value = words[at].partition("=")
        if name == "--entrypoint":
            own, after = ([value], words[at + 1 :]) if value else (words[at + 1 : at + 2], words[at + 2 :])
            image = _docker_image(after, 0)
            return [*words[:at], "--entrypoint=", *after[: image + 1], *own, *after[image + 1 :]]
    return words


def _find_program(words: list[str]) -> tuple[list[str], str, list[str]]:
    """(words before the program, the program, the words after it)."""
    if words[0].startswith("-"):
        return [], "", words
    start, runs = find_start(words), _docker_run(words)
    if runs is not None and (start is None or runs < start.begin):
        image = _docker_image(words, runs + 2)
        inside = find_start(["", *words[image + 1 :]])
        if inside is None:
            return words[:image], words[image], words[image + 1 :]
        begin, end = image + max(inside.begin, 1), image + inside.end
        return words[:begin], shlex.join(words[begin:end]), words[end:]
    assert start is not None, "a server is named"
    return words[: start.begin], shlex.join(words[start.begin : start.end]), words[start.end :]


def _docker_run(words: Sequence[str]) -> int | None:
    """Index of the ``docker`` in ``docker run``."""
    for at, (word, following) in enumerate(pairwise(words)):
        if word.rsplit("/", 1)[-1] in ("docker", "podman") and following == "run":
            return at
    return None


def _docker_image(words: Sequence[str], at: int) -> int:
    """Index of the image: the first word after ``docker run`` that is no option and no option's value."""
    while at < len(words):
        word = words[at]
        if not word.startswith("-"):
            return at
        at += 1 if _DOCKER_SWITCHES.fullmatch(word) or "=" in word else 2
    raise FlagError("'docker run' names no image: write 'docker run [options] vllm/vllm-openai --model M …'")
