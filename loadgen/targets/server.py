"""Targets behind HTTP: a server started from a command, and one that is already running."""

from __future__ import annotations

import itertools
import re
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.flags import render, split_words
from loadgen.target import OpenTarget, RunFailed, StartFailed, Target
from loadgen.targets.failures import classify
from loadgen.targets.http import Http, Unreachable
from loadgen.targets.process import ServerProcess

if TYPE_CHECKING:
    from loadgen.record import Records
    from loadgen.workload import Schedule

DEFAULT_PORT = 8000
SCRAPE_SECONDS = 1.0
_WATCH_SECONDS = 0.2
_PORT_ATTEMPTS = 3
_HTTP_TIMEOUT = 2.0
_TAIL = 30


class OpenServer(OpenTarget):
    """A server that answers. ``process`` is None when it is not ours."""

    def __init__(self, http: Http, process: ServerProcess | None, api_key: str | None) -> None:
        self.url = http.url
        self.log_path = process.log_path if process else None
        self._http, self._process, self._api_key = http, process, api_key

    def run(
        self,
        schedule: Schedule,
        progress: Callable[..., None] | None = None,
        stop: threading.Event | None = None,
    ) -> Records:
        from loadgen.client import run_schedule

        with _Watch(self, self._process, stop) as watch:
            records = run_schedule(
                self.url,
                schedule,
                model=self.model,
                api_key=self._api_key,
                progress=progress,
                stop=watch.stop,
            )
        records.scrapes = watch.scrapes
        if self._process and (status := self._process.poll()) is not None:
            failure = classify(self.log_tail(200), status)
            raise RunFailed(
                failure.reason, failure.detail, self.log_tail(_TAIL), self.log_path, records=records
            )
        return records

    def scrape(self) -> str:
        try:
            answer = self._http.get("/metrics", _HTTP_TIMEOUT)
        except Unreachable:
            return ""
        return answer.body if answer.status == 200 else ""

    def log_tail(self, lines: int = _TAIL) -> str:
        return self._process.log_tail(lines) if self._process else ""

    def identify(self) -> None:
        """Read the model's name and context length from /v1/models, where the server has it."""
        models = (self._http.get("/v1/models", _HTTP_TIMEOUT).json() or {}).get("data") or [{}]
        self.model = models[0].get("id") or self.model
        self.max_model_len = models[0].get("max_model_len")

    def probe(self, timeout: float) -> None:
        """One small request: a server that says it is healthy must also answer. Raises StartFailed."""
        body = {"model": self.model, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
        try:
            answer = self._http.post("/v1/completions", body, timeout)
        except Unreachable as error:
            reason = "hangs" if error.timed_out else "unhealthy"
            raise self._failed(reason, f"healthy, but the first request failed: {error}") from None
        content = answer.json()
        if answer.status != 200 or not isinstance(content, dict) or not content.get("choices"):
            text = answer.body.strip()[:300]
            raise self._failed(
                "unhealthy", f"healthy, but the first request got HTTP {answer.status}: {text}"
            )

    def _failed(self, reason: str, detail: str) -> StartFailed:
        return StartFailed(reason, detail, self.log_tail(), self.log_path)


class ServerTarget(Target):
    """A server that is started from a command for each config.

    ``template`` is that command, as one would type it: ``VAR=x my-server {flags} --port {port}``.
    ``{flags}`` and ``--port {port}`` are appended where they are missing; a literal ``--port N`` is
    replaced, since every server gets a free port. No shell is involved. Logs go to ``log_dir`` (default:
    a new temporary directory), a file a start. ``start_timeout`` seconds until healthy, ``probe_timeout``
    until the first answer, ``grace`` between SIGTERM and SIGKILL. Raises FlagError for a template that
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
        api_key: str | None = None,
        exclusive: bool = False,
    ) -> None:
        template_env, words = split_words(template)
        self._words = _with_placeholders(words)
        self._env = {**template_env, **(env or {})}
        self._executable = list(executable)
        """What runs in place of the template's first word; what is displayed is the template."""
        self.name = name or Path(words[0]).name
        self.exclusive = exclusive
        self._log_dir = log_dir
        self._start_timeout, self._probe_timeout, self._grace = start_timeout, probe_timeout, grace
        self._api_key = api_key
        self._starts = itertools.count(1)

    @classmethod
    def bundled(cls, model: str = "bundled", **options: Any) -> ServerTarget:
        """The engine of this package, run by this interpreter."""
        script = Path(sys.executable).with_name("vtune")
        entry = [str(script)] if script.exists() else [sys.executable, "-m", "vtune_cli"]
        options = {"name": "bundled", "executable": entry, **options}
        return cls(f"vtune serve {shlex.quote(model)} {{flags}} --port {{port}}", **options)

    @classmethod
    def vllm(cls, model: str, **options: Any) -> ServerTarget:
        """vLLM, as installed beside us. One at a time: each instance claims its share of the device."""
        options = {"name": "vllm", "exclusive": True, **options}
        return cls(f"vllm serve {shlex.quote(model)} {{flags}} --port {{port}}", **options)

    def launch_command(self, config: Mapping[str, Any]) -> str:
        env = [f"{name}={shlex.quote(value)}" for name, value in self._env.items()]
        return " ".join([*env, shlex.join(_fill(self._words, config, DEFAULT_PORT))])

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenServer]:
        """Start a server and wait until it has answered a request. Raises StartFailed."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            started = time.monotonic()
            port = free_port()
            process = self._launch(config, port)
            try:
                try:
                    server = self._await(process, port)
                except StartFailed as failure:
                    if failure.reason == "port_taken" and attempt < _PORT_ATTEMPTS:
                        continue
                    raise
                server.start_seconds = time.monotonic() - started
                yield server
                return
            finally:
                process.stop()

    def _launch(self, config: Mapping[str, Any], port: int) -> ServerProcess:
        words = _fill(self._words, config, port)
        command = [*self._executable, *words[1:]] if self._executable else words
        program = shutil.which(command[0])
        if program is None:
            raise StartFailed(
                "not_found",
                f"there is no program {command[0]!r}: install it, or give the command's full path",
            )
        try:
            return ServerProcess(
                [program, *command[1:]], log_path=self._next_log(), env=self._env, grace=self._grace
            )
        except OSError as error:
            raise StartFailed("log", f"{error.filename}: {error.strerror}") from None

    def _next_log(self) -> Path:
        if self._log_dir is None:
            self._log_dir = Path(tempfile.mkdtemp(prefix="vtune-logs-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        for number in self._starts:
            path = self._log_dir / f"{self.name}-{number:03d}.log"
            if not path.exists():
                return path
        raise AssertionError("itertools.count ends never")

    def _await(self, process: ServerProcess, port: int) -> OpenServer:
        http = Http(f"http://127.0.0.1:{port}", self._api_key)
        server = OpenServer(http, process, self._api_key)
        try:
            self._await_health(process, http)
            server.identify()
            server.probe(self._probe_timeout)
        except (StartFailed, Unreachable) as failure:
            time.sleep(2 * _WATCH_SECONDS)  # a dying server closes its sockets a little before it is gone
            self._raise_if_ended(process)
            if isinstance(failure, StartFailed):
                raise
            raise StartFailed("unhealthy", str(failure), process.log_tail(), process.log_path) from None
        self._raise_if_ended(process)
        return server

    def _await_health(self, process: ServerProcess, http: Http) -> None:
        deadline = time.monotonic() + self._start_timeout
        pause = 0.05
        while problem := _health_problem(http):
            self._raise_if_ended(process)
            if time.monotonic() > deadline:
                raise StartFailed(
                    "timeout",
                    f"not healthy after {self._start_timeout:g} s: {problem}",
                    process.log_tail(),
                    process.log_path,
                )
            time.sleep(pause)
            pause = min(pause * 1.3, 0.5)

    @staticmethod
    def _raise_if_ended(process: ServerProcess) -> None:
        if (status := process.poll()) is not None:
            failure = classify(process.log_tail(200), status)
            raise StartFailed(failure.reason, failure.detail, process.log_tail(_TAIL), process.log_path)


class EndpointTarget(Target):
    """A server that is already running and is not ours: measured as it is, never restarted.

    ``flags`` are the flags it is known to run with; a config that asks for others is refused.
    """

    restartable = False

    def __init__(
        self,
        url: str,
        *,
        flags: Mapping[str, Any] | None = None,
        model: str | None = None,
        api_key: str | None = None,
        probe_timeout: float = 120.0,
    ) -> None:
        self._http = Http(url, api_key)
        self.name = self._http.url
        self._flags = dict(flags or {})
        self._model, self._api_key, self._probe_timeout = model, api_key, probe_timeout

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return " ".join(["(already running at", self._http.url + ")", shlex.join(render(config))]).strip()

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenServer]:
        """Check that it answers. Raises StartFailed."""
        changed = sorted(name for name, value in config.items() if self._flags.get(name) != value)
        if changed:
            raise StartFailed(
                "not_restartable",
                f"{self._http.url} is already running and cannot be given other flags "
                f"({', '.join(changed)}): name a command that starts one, such as 'vllm serve M {{flags}}'",
            )
        if problem := _health_problem(self._http):
            raise StartFailed("unreachable", problem)
        server = OpenServer(self._http, None, self._api_key)
        try:
            server.identify()
        except Unreachable as error:
            raise StartFailed("unreachable", str(error)) from None
        server.model = self._model or server.model
        server.probe(self._probe_timeout)
        yield server


class _Watch:
    """Beside a load: scrapes the metrics every second and ends the load when the server ends."""

    def __init__(
        self, server: OpenServer, process: ServerProcess | None, stop: threading.Event | None
    ) -> None:
        self.stop = threading.Event()
        self.scrapes: list[tuple[int, str]] = []
        self._server, self._process, self._asked = server, process, stop
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="scrapes", daemon=True)

    def __enter__(self) -> _Watch:
        self._scrape()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if not self._ended():
            self._scrape()

    def _watch(self) -> None:
        due = time.monotonic() + SCRAPE_SECONDS
        while not self._done.wait(_WATCH_SECONDS):
            if self._ended() or (self._asked is not None and self._asked.is_set()):
                self.stop.set()
                return
            if time.monotonic() >= due and self.scrapes:
                self._scrape()
                due = time.monotonic() + SCRAPE_SECONDS

    def _ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def _scrape(self) -> None:
        stamp = time.time_ns() // 1_000_000
        if text := self._server.scrape():
            self.scrapes.append((stamp, text))


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now; nothing keeps it so."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _health_problem(http: Http) -> str:
    """Why the server is not healthy yet; "" when it is. One without /health is asked for its models."""
    try:
        answer = http.get("/health", _HTTP_TIMEOUT)
        if answer.status == 404:
            answer = http.get("/v1/models", _HTTP_TIMEOUT)
    except Unreachable as error:
        return str(error)
    return (
        "" if answer.status == 200 else f"{http.url}/health: HTTP {answer.status} {answer.body.strip()[:200]}"
    )


def _with_placeholders(words: Sequence[str]) -> list[str]:
    """The template's words with ``{flags}`` and ``--port {port}`` in it, whatever port it named itself."""
    joined = "\0".join(words)
    if "{port}" not in joined:
        joined = re.sub(r"(^|\0)--port(\0|=)[^\0]*", "", joined)
    filled = joined.split("\0")
    if "{flags}" not in filled:
        filled.append("{flags}")
    if "{port}" not in joined:
        filled += ["--port", "{port}"]
    return filled


def _fill(words: Sequence[str], config: Mapping[str, Any], port: int) -> list[str]:
    filled: list[str] = []
    for word in words:
        filled += render(config) if word == "{flags}" else [word.replace("{port}", str(port))]
    return filled
