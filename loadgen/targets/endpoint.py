"""A server that answers HTTP, started here or elsewhere: load, scrapes, probe."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadgen.target import CLIENT_KILLED, OpenTarget, RunFailed, StartFailed, Target
from loadgen.targets.http import Http, NoAnswer
from loadgen.targets.process import ServerProcess
from loadgen.targets.scraper import Scraper, scrape
from servers.connection import NO_LOGIN, Connection
from servers.failures import classify
from servers.flags.words import render
from servers.kinds import KINDS

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from loadgen.plan.workload import Schedule

_WATCH_SECONDS = 0.2
_EXIT_SECONDS = 5.0
"""How long a server that stopped answering may take to be gone."""
_HEALTH_TIMEOUT, _TOLD_TIMEOUT = 2.0, 10.0
"""Of a question about health, which is asked again, and of one about the model, which a server that has just
started may be slow to answer."""
_VERSION_PATHS = tuple(dict.fromkeys(kind.version_path for kind in KINDS.values() if kind.version_path))


class OpenServer(OpenTarget):
    """A server that answers. ``process`` is None when it is not ours."""

    def __init__(
        self, http: Http, process: ServerProcess | None, model: str = "", priorities: bool = False
    ) -> None:
        """``priorities``: whether it schedules by them, and so takes any."""
        self.url, self.model, self._priorities = http.url, model, priorities
        self.log_path = process.log_path if process else None
        self._http, self._process = http, process

    def run(
        self,
        schedule: Schedule,
        progress: Callable[..., None] | None = None,
        stop: threading.Event | None = None,
        *,
        timeout: float = 600.0,
        drain: float | None = None,
    ) -> Records:
        """See :meth:`OpenTarget.run`. Raises RunFailed."""
        from loadgen.wire.client import Unreachable, run_schedule
        from loadgen.wire.worker import WorkerDied

        ended = threading.Event()

        def over() -> bool:
            """The load should end: a stop was asked for, or the server is gone."""
            if self.ended() or (stop is not None and stop.is_set()):
                ended.set()
            return ended.is_set()

        with Scraper(self.scrape, over) as scraper:
            try:
                records = run_schedule(
                    self.url,
                    schedule if self._priorities else schedule.without_priorities(),
                    model=self.model or None,
                    connection=self._http.connection,
                    progress=progress,
                    stop=ended,
                    timeout=timeout,
                    drain=drain,
                )
            except Unreachable as error:
                self.raise_if_ended(RunFailed, _EXIT_SECONDS)
                reason = "hangs" if self._process else "unreachable"
                raise RunFailed(reason, str(error), self.log_tail(), self.log_path) from None
            except WorkerDied as error:
                raise RunFailed(CLIENT_KILLED, str(error)) from None
        records = replace(records, scrapes=tuple(scraper.scrapes))
        try:
            self._check_after_load()
        except RunFailed as failure:
            failure.records = records
            raise
        return records

    def _check_after_load(self) -> None:
        """A server that is too busy to answer is let off; one that is gone or says it is ill is not."""
        self.raise_if_ended(RunFailed)
        problem, answered = self._health()
        if problem:
            self.raise_if_ended(RunFailed, _EXIT_SECONDS)
            if answered:
                raise RunFailed("unhealthy", problem, self.log_tail(), self.log_path)

    def scrape(self) -> str:
        return scrape(self._http)

    def log_tail(self, lines: int = 30) -> str:
        return self._http.connection.hide(self._process.log_tail(lines)) if self._process else ""

    def health_problem(self) -> str:
        """Why the server is not healthy; "" when it is. One without /health is asked for its models."""
        return self._health()[0]

    def _health(self) -> tuple[str, bool]:
        """(the problem or "", whether the server answered at all)."""
        try:
            answer = self._http.get("/health", _HEALTH_TIMEOUT)
            if answer.status == 404:
                answer = self._http.get("/v1/models", _HEALTH_TIMEOUT)
        except NoAnswer as error:
            return str(error), False
        if answer.status in (200, 401, 403):  # whether a key is wanted, the first request will say
            return "", True
        return f"{self.url}/health: HTTP {answer.status} {answer.body.strip()[:200]}".rstrip(), True

    def check(self, timeout: float) -> None:
        """Read the model's name and length, then send one small request: a server that says it is healthy
        must also answer, within ``timeout`` seconds. Raises StartFailed."""
        try:
            self.identify()
            body = {"model": self.model, "prompt": "Hello", "max_tokens": 2, "temperature": 0}
            answer = self._http.post("/v1/completions", body, timeout)
        except NoAnswer as error:
            self.raise_if_ended(StartFailed, _EXIT_SECONDS if not error.timed_out else 0)
            reason = "hangs" if error.timed_out else "unhealthy"
            raise self._start_failed(reason, f"healthy, but the first request failed: {error}") from None
        if answer.status in (401, 403):
            problem = f"{self.url}: HTTP {answer.status}; {self._http.connection.refused}"
            raise self._start_failed("unauthorized", problem)
        content = answer.json()
        if answer.status != 200 or not isinstance(content, dict) or not content.get("choices"):
            self.raise_if_ended(StartFailed)
            text = answer.body.strip()[:300]
            raise self._start_failed(
                "unhealthy", f"healthy, but the first request got HTTP {answer.status}: {text}"
            )

    def raise_if_ended(self, error: type[StartFailed] | type[RunFailed], patience: float = 0.0) -> None:
        """Raise ``error`` with the cause, if our process has ended or ends within ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while self._process and (status := self._process.poll()) is None and time.monotonic() < deadline:
            time.sleep(_WATCH_SECONDS)
        if self._process and (status := self._process.poll()) is not None:
            failure = classify(self.log_tail(200), status)
            raise error(failure.reason, failure.detail, self.log_tail(), self.log_path)

    def ended(self) -> bool:
        """True when our process is gone; False for a server that is not ours."""
        return self._process is not None and self._process.poll() is not None

    def identify(self) -> None:
        """Read the model's name and length and the server's version. Raises NoAnswer."""
        content = self._http.get("/v1/models", _TOLD_TIMEOUT).json()
        models = content.get("data") if isinstance(content, dict) else None
        if models and isinstance(models[0], dict):
            self.model = self.model or str(models[0].get("id", ""))
            self.max_model_len = models[0].get("max_model_len")
        for path in _VERSION_PATHS:
            told = self._http.get(path, _TOLD_TIMEOUT).json()
            if isinstance(told, dict) and isinstance(told.get("version"), str):
                self.version = told["version"]
                return

    def _start_failed(self, reason: str, detail: str) -> StartFailed:
        return StartFailed(reason, detail, self.log_tail(), self.log_path)


def heeds_priorities(flags: Mapping[str, Any]) -> bool:
    """Whether a server with these flags, by vLLM's names, schedules by priority."""
    return bool(flags.get("scheduling_policy") == "priority")


class EndpointTarget(Target):
    """A server that is already running and is not ours: measured as it is, never restarted.

    ``flags`` are the flags it is known to run with; a config that asks for others is refused. ``model``
    defaults to the first one that the server lists. Raises UrlError for a bad URL.
    """

    restartable = False

    def __init__(
        self,
        url: str,
        *,
        flags: Mapping[str, Any] | None = None,
        model: str = "",
        connection: Connection = NO_LOGIN,
        probe_timeout: float = 120.0,
    ) -> None:
        self._http = Http(url, connection)
        self.name = self._http.url
        self._flags = dict(flags or {})
        self._model, self._probe_timeout = model, probe_timeout

    def launch_command(self, config: Mapping[str, Any]) -> str:
        """The flags only: how the server is launched is not known."""
        return shlex.join(render({**self._flags, **config}))

    def context_length(self) -> int | None:
        """In tokens, as the server lists it; None where it does not say. Nothing is generated for it."""
        server = OpenServer(self._http, None, self._model)
        try:
            server.identify()
        except NoAnswer:
            return None
        return server.max_model_len

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenServer]:
        """Check that it answers. Raises StartFailed."""
        changed = sorted(name for name, value in config.items() if self._flags.get(name) != value)
        if changed:
            raise StartFailed(
                "not_restartable",
                f"{self.name} is already running and cannot be given other flags ({', '.join(changed)}): "
                "name a command that starts a server, such as 'vllm serve M {flags}'",
            )
        server = OpenServer(self._http, None, self._model, heeds_priorities(self._flags))
        if problem := server.health_problem():
            raise StartFailed("unreachable", problem)
        server.check(self._probe_timeout)
        yield server
