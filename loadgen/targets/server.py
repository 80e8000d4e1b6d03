"""A server that is started from a command, with other flags for each config."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from loadgen.target import AtOnce, StartFailed, Target
from loadgen.targets.endpoint import OpenServer, heeds_priorities
from loadgen.targets.http import Http
from loadgen.targets.process import ServerProcess
from servers.command import ServerCommand
from servers.connection import NO_LOGIN, Connection, masked
from servers.flags.offered_flags import OfferedFlags, read_offered_flags
from servers.flags.words import FlagError
from servers.kind import ServerKind
from servers.kinds import BUNDLED, VLLM, find_start
from servers.shell_words import split_words

DEFAULT_PORT = 8000
"""The port in commands that are shown; vLLM's and ours."""
_PORT_ATTEMPTS = 3


class ServerTarget(Target):
    """A server that is started from a command for each config.

    ``template`` is that command, as one would type it: ``VAR=x my-server {flags} --port {port}``. ``{flags}``
    and ``--port {port}`` are appended where they are missing; a literal ``--port N`` is replaced, since every
    server gets a free port. No shell is involved; ``vtune`` is the one of this interpreter. Configs are in
    vLLM's names; a server is given its own. It listens on 127.0.0.1 unless the template says otherwise. Each
    start logs to a new file in ``log_dir`` (default: a temporary directory). Seconds: ``start_timeout`` until
    healthy, ``probe_timeout`` until the first answer, ``grace`` between SIGTERM and SIGKILL.

    The API key that is sent is the one in the server's own command, ``server_key``, which is added to that,
    or its variable's; without any, what ``connection`` has. Raises FlagError for a template that is empty or
    cannot be split.
    """

    def __init__(
        self,
        template: str,
        *,
        name: str | None = None,
        executable: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        start_timeout: float = 600.0,
        probe_timeout: float = 120.0,
        grace: float = 10.0,
        connection: Connection = NO_LOGIN,
        server_key: str | None = None,
        exclusive: bool | None = None,
    ) -> None:
        template_env, words = split_words(template)
        if not words:
            raise FlagError(
                f"{template!r} names no program: write e.g. 'my-server {{flags}} --port {{port}}'"
            )
        start = find_start(words)
        self.kind = start.kind if start else None
        """Whose flags it takes; None where its command does not say."""
        self._spelling = (self.kind or VLLM).spelling
        self._program_words = start.end if start else 0
        self._words = _with_placeholders(words, self._option("port"))
        self._env = {**template_env, **(env or {})}
        self._executable = list(executable) or (_own_command() if words[0] == "vtune" else [])
        """What runs in place of the template's first word; what is shown is the template."""
        self.name = name or Path(words[0]).name
        shares = self.kind is not None and self.kind.exclusive
        self.exclusive = shares if exclusive is None else exclusive
        self._log_dir = log_dir
        self._start_timeout, self._probe_timeout, self._grace = start_timeout, probe_timeout, grace
        self._connection, self._server_key = connection, server_key
        self._starts = itertools.count(1)

    @classmethod
    def bundled(cls, model: str = "bundled", **options: Any) -> ServerTarget:
        """The engine of this package, run by this interpreter."""
        return cls.of(BUNDLED, model, **options)

    @classmethod
    def of(cls, kind: ServerKind, model: str, *, command: str = "", **options: Any) -> ServerTarget:
        """A server of ``kind`` as installed beside us, or as ``command`` (without the flags) starts it."""
        words = command or shlex.join(ServerCommand(kind.command, model).words())
        more = [switch for switch in kind.always if switch not in words]
        return cls(" ".join([words, *more]), **{"name": kind.name, **options})

    def _option(self, flag: str) -> str:
        """How the server's command line has one of vLLM's flags."""
        return "--" + self._spelling.own(flag).replace("_", "-")

    def launch_command(self, config: Mapping[str, Any]) -> str:
        """Without keys. Raises FlagError for a flag of vLLM's that the server has nothing like."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self._env.items()]
        return masked(" ".join([*env, shlex.join(self._fill(config, DEFAULT_PORT))]))

    def offered_flags(self) -> OfferedFlags | None:
        """What the installed program takes, in its own names; None where it cannot be asked."""
        if self.kind is None:
            return None
        words = [*self._executable, *self._words[1 : self._program_words]]
        if not self._executable:
            words = [self._words[0], *words]
        program = self._which(words[0])
        if program is None:
            return None
        return read_offered_flags(
            [program, *words[1:]], self.kind.help, self._env, cached=self.kind.help_cached
        )

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenServer]:
        """Start a server and wait until it has answered a request. Raises StartFailed."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            started = time.monotonic()
            port = free_port()
            process, connection = self._launch(config, port)
            try:
                http = Http(f"http://127.0.0.1:{port}", connection)
                server = OpenServer(http, process, priorities=heeds_priorities(config))
                try:
                    self._await_health(server)
                    if process.finds_taken(port):
                        raise StartFailed("port_taken", f"another server answers on port {port}")
                    server.check(self._probe_timeout)
                except StartFailed as failure:
                    if failure.reason == "port_taken" and attempt < _PORT_ATTEMPTS:
                        continue
                    raise
                server.start_seconds = time.monotonic() - started
                yield server
                return
            except AtOnce:
                process.stop_at_once()
                raise
            finally:
                process.stop()

    def _launch(self, config: Mapping[str, Any], port: int) -> tuple[ServerProcess, Connection]:
        """The process, and how it is asked."""
        try:
            words = self._fill(config, port)
        except FlagError as error:
            raise StartFailed("bad_flag", str(error)) from None
        if self.kind is not None and self.kind.public and self._option("host") not in words:
            words += [self._option("host"), "127.0.0.1"]
        words, env, key = self._keyed(words)
        command = [*self._executable, *words[1:]] if self._executable else words
        program = self._which(command[0])
        if program is None:
            raise StartFailed(
                "not_found",
                f"there is no program {command[0]!r}: install it, or give the command's full path",
            )
        try:
            log_path = self._next_log()
            process = ServerProcess([program, *command[1:]], log_path=log_path, env=env, grace=self._grace)
        except OSError as error:
            raise StartFailed("log", f"{error.filename}: {error.strerror}") from None
        own = self._connection if key is None else replace(self._connection, api_key=key, user=None)
        return process, own

    def _keyed(self, words: list[str]) -> tuple[list[str], dict[str, str], str | None]:
        """(the words, the environment, the key that the server will ask for).

        A key goes through the environment where the server reads one there: command lines are seen by all.
        """
        option, variable = self._option("api_key"), self.kind.key_variable if self.kind else ""
        if self._server_key is not None:
            words = [*words, option, self._server_key]
        others, keys = _taken_out(words, option)
        if not keys:
            return words, self._env, self._env.get(variable) or os.environ.get(variable)
        if variable and len(keys) == 1:
            return others, {**self._env, variable: keys[0]}, keys[0]
        return words, self._env, keys[0]

    def _which(self, program: str) -> str | None:
        return shutil.which(program, path=self._env.get("PATH"))

    def _fill(self, config: Mapping[str, Any], port: int) -> list[str]:
        """The template's words with the flags and the port in them."""
        offered = self._offered if self._spelling.depends_on_release(config) else None
        flags = self._spelling.render(config, offered)
        filled: list[str] = []
        for word in self._words:
            filled += flags if word == "{flags}" else [word.replace("{port}", str(port))]
        return filled

    @cached_property
    def _offered(self) -> OfferedFlags | None:
        return self.offered_flags()

    def _next_log(self) -> Path:
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="vtune-logs-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        paths = (self._log_dir / f"{self.name}-{number:03d}.log" for number in self._starts)
        return next(path for path in paths if not path.exists())

    def _await_health(self, server: OpenServer) -> None:
        deadline = time.monotonic() + self._start_timeout
        pause = 0.05
        while problem := server.health_problem():
            server.raise_if_ended(StartFailed)
            if time.monotonic() > deadline:
                raise StartFailed(
                    "timeout",
                    f"not healthy after {self._start_timeout:g} s: {problem}",
                    server.log_tail(),
                    server.log_path,
                )
            time.sleep(pause)
            pause = min(pause * 1.3, 0.5)


def _own_command() -> list[str]:
    """The ``vtune`` of this interpreter, whatever is first on the path."""
    script = Path(sys.executable).with_name("vtune")
    return [str(script)] if script.exists() else [sys.executable, "-c", "import vtune_cli; vtune_cli.main()"]


def _taken_out(words: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """(the other words, the values of ``option``), written as ``--x A``, ``--x A B`` or ``--x=A``."""
    others: list[str] = []
    values: list[str] = []
    inside = False
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            inside = not equals
            values += [value] if equals else []
        elif inside and not word.startswith("-"):
            values.append(word)
        else:
            inside = False
            others.append(word)
    return others, values


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now; nothing keeps it so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _with_placeholders(words: Sequence[str], port: str) -> list[str]:
    """The template's words with ``{flags}`` and ``--port {port}`` in it, whatever port it named itself."""
    joined = "\0".join(words)
    own_port = "{port}" in joined
    if not own_port:
        joined = re.sub(rf"\0{port}(\0|=)[^\0]*", "", joined)
    filled = joined.split("\0")
    if "{flags}" not in filled:
        filled.append("{flags}")
    return filled if own_port else [*filled, port, "{port}"]
