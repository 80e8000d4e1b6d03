"""A server that is started from a command, with other flags for each config."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from loadgen.target import AtOnce, StartFailed, Target
from loadgen.targets.endpoint import OpenServer
from loadgen.targets.http import Http
from loadgen.targets.process import ServerProcess
from servers.flags.offered_flags import OfferedFlags, read_offered_flags
from servers.flags.sglang_flags import render_sglang
from servers.flags.words import FlagError, render, split_words

DEFAULT_PORT = 8000
"""The port in commands that are shown; vLLM's and ours."""
_PORT_ATTEMPTS = 3
Kind = Literal["bundled", "vllm", "sglang", ""]
"""Whose flags a server takes; "" where its command does not say."""
_HELP: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "bundled": (("--help",),),
    "vllm": (("--help=all",), ("--help",)),  # before 0.9 there was no page of all flags
    "sglang": (("--help",),),
}
_LOOPBACK = ("--host", "127.0.0.1")
_SERVE: dict[str, Kind] = {"vtune": "bundled", "vllm": "vllm", "sglang": "sglang"}
"""Program -> whose flags follow its ``serve``."""


class ServerTarget(Target):
    """A server that is started from a command for each config.

    ``template`` is that command, as one would type it: ``VAR=x my-server {flags} --port {port}``. ``{flags}``
    and ``--port {port}`` are appended where they are missing; a literal ``--port N`` is replaced, since every
    server gets a free port. No shell is involved; ``vtune`` is the one of this interpreter. Configs are in
    vLLM's names; SGLang is given its own. vLLM listens on 127.0.0.1 unless the template says otherwise. Each
    start logs to a new file in ``log_dir`` (default: a temporary directory). Seconds: ``start_timeout`` until
    healthy, ``probe_timeout`` until the first answer, ``grace`` between SIGTERM and SIGKILL. Raises FlagError
    for a template that is empty or cannot be split.
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
        api_key: str | None = None,
        exclusive: bool | None = None,
    ) -> None:
        template_env, words = split_words(template)
        if not words:
            raise FlagError(
                f"{template!r} names no program: write e.g. 'my-server {{flags}} --port {{port}}'"
            )
        self._words = _with_placeholders(words)
        self.kind, self._program_words = _kind(words)
        self._render = render_sglang if self.kind == "sglang" else render
        self._env = {**template_env, **(env or {})}
        self._executable = list(executable) or (_own_command() if words[0] == "vtune" else [])
        """What runs in place of the template's first word; what is shown is the template."""
        self.name = name or Path(words[0]).name
        # Two instances of vLLM or SGLang would each claim their share of one device.
        self.exclusive = self.kind in ("vllm", "sglang") if exclusive is None else exclusive
        self._log_dir = log_dir
        self._start_timeout, self._probe_timeout, self._grace = start_timeout, probe_timeout, grace
        self._api_key = api_key
        self._starts = itertools.count(1)

    @classmethod
    def bundled(cls, model: str = "bundled", **options: Any) -> ServerTarget:
        """The engine of this package, run by this interpreter."""
        options = {"name": "bundled", **options}
        return cls(f"vtune serve {shlex.quote(model)} {{flags}} --port {{port}}", **options)

    @classmethod
    def vllm(cls, model: str, *, template: str = "", **options: Any) -> ServerTarget:
        """vLLM, as installed beside us, or as ``template`` starts it."""
        options = {"name": "vllm", **options}
        return cls(template or f"vllm serve {shlex.quote(model)} {{flags}} --port {{port}}", **options)

    @classmethod
    def sglang(cls, model: str, *, template: str = "", **options: Any) -> ServerTarget:
        """SGLang, as installed beside us, or as ``template`` starts it. Its metrics must be asked for."""
        options = {"name": "sglang", **options}
        words = template or f"python -m sglang.launch_server --model-path {shlex.quote(model)}"
        metrics = "" if "--enable-metrics" in words else "--enable-metrics "
        return cls(f"{words.replace(' {flags}', '')} {metrics}{{flags}} --port {{port}}", **options)

    def launch_command(self, config: Mapping[str, Any]) -> str:
        """Raises FlagError for a flag of vLLM's that the server has nothing like."""
        env = [f"{name}={shlex.quote(value)}" for name, value in self._env.items()]
        return " ".join([*env, shlex.join(self._fill(config, DEFAULT_PORT))])

    def offered_flags(self) -> OfferedFlags | None:
        """What the installed program takes, in its own names; None where it cannot be asked."""
        if not self.kind:
            return None
        words = [*self._executable, *self._words[1 : self._program_words]]
        if not self._executable:
            words = [self._words[0], *words]
        program = self._which(words[0])
        if program is None:
            return None
        ours = self.kind == "bundled"  # quick to ask, and its flags change without its program
        return read_offered_flags([program, *words[1:]], _HELP[self.kind], self._env, cached=not ours)

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenServer]:
        """Start a server and wait until it has answered a request. Raises StartFailed."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            started = time.monotonic()
            port = free_port()
            process = self._launch(config, port)
            try:
                server = OpenServer(Http(f"http://127.0.0.1:{port}", self._api_key), process)
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

    def _launch(self, config: Mapping[str, Any], port: int) -> ServerProcess:
        try:
            words = self._fill(config, port)
        except FlagError as error:
            raise StartFailed("bad_flag", str(error)) from None
        if self.kind == "vllm" and "--host" not in words:  # its default is every address of the machine
            words += _LOOPBACK
        command = [*self._executable, *words[1:]] if self._executable else words
        program = self._which(command[0])
        if program is None:
            raise StartFailed(
                "not_found",
                f"there is no program {command[0]!r}: install it, or give the command's full path",
            )
        try:
            log_path = self._next_log()
            return ServerProcess([program, *command[1:]], log_path=log_path, env=self._env, grace=self._grace)
        except OSError as error:
            raise StartFailed("log", f"{error.filename}: {error.strerror}") from None

    def _which(self, program: str) -> str | None:
        return shutil.which(program, path=self._env.get("PATH"))

    def _fill(self, config: Mapping[str, Any], port: int) -> list[str]:
        """The template's words with the flags and the port in them."""
        filled: list[str] = []
        for word in self._words:
            filled += self._render(config) if word == "{flags}" else [word.replace("{port}", str(port))]
        return filled

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


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now; nothing keeps it so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _with_placeholders(words: Sequence[str]) -> list[str]:
    """The template's words with ``{flags}`` and ``--port {port}`` in it, whatever port it named itself."""
    joined = "\0".join(words)
    own_port = "{port}" in joined
    if not own_port:
        joined = re.sub(r"\0--port(\0|=)[^\0]*", "", joined)
    filled = joined.split("\0")
    if "{flags}" not in filled:
        filled.append("{flags}")
    return filled if own_port else [*filled, "--port", "{port}"]


def server_kind(template: str) -> Kind:
    """Whose flags the server of a command template takes. Raises FlagError for quotes that do not match."""
    return _kind(split_words(template)[1])[0]


def _kind(words: Sequence[str]) -> tuple[Kind, int]:
    """(whose server it is, how many words come before the server's own flags); ("", 0) for an unknown one."""
    for at, (word, following) in enumerate(itertools.pairwise(words)):
        if following == "serve" and (kind := _SERVE.get(Path(word).name)):
            return kind, at + 2
        if word == "-m" and following.startswith("vllm.entrypoints."):
            return "vllm", at + 2
        if word == "-m" and following.startswith("sglang."):
            return "sglang", at + 2
    return "", 0
