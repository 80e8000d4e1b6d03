"""Where metrics come from: a recorded series, a /metrics page watched for a while, a live Prometheus."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from doctor.metrics.evaluators import Evaluator, ScrapeEvaluator, Span
from doctor.metrics.period import Period, PeriodError
from doctor.metrics.promql import PromQL
from loadgen.measure.clock import UnixClock
from servers.connection import NO_LOGIN, Connection
from servers.errors import SourceError
from servers.kind import ServerKind
from servers.kinds import LABELS, find_family
from servers.metrics.exposition import ExpositionError, Recording, read_series_text, record, split_scrapes

TIMEOUT_S = 10.0
QUERY_TIMEOUT_S = 30.0
"""One query asks for many signals of a whole fleet."""


@dataclass(frozen=True)
class Observation:
    """One window of metrics, ready to be asked."""

    name: str
    evaluator: Evaluator
    family: str
    """Engine and version range, from the metric names."""
    window_s: float
    kind: ServerKind
    """Whose metrics they are."""
    notes: tuple[str, ...] = ()
    version: str | None = None
    """The server's own version, where it says."""
    since_start: bool = False
    """One scrape (see ``Recording``), which shows no server to be healthy."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the source tells beside signals; :data:`doctor.diagnosis.playbook.TOLD` has the names."""


class Source(ABC):
    """Gives an observation of the last ``window`` seconds (None: the source's own default).

    ``slo`` resolves bucket thresholds that an SLO names. Raises SourceError.
    """

    name: str

    @abstractmethod
    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation: ...


class Scrapes(Source):
    """Scrapes in memory: (unix ms, exposition text), such as ``Records.scrapes`` of a load run."""

    def __init__(
        self, scrapes: Iterable[tuple[int, str]], name: str = "scrapes", notes: Iterable[str] = ()
    ) -> None:
        self.scrapes = list(scrapes)
        self.name = name
        self.notes = tuple(notes)

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """Raises SourceError where none is usable, or only one of several."""
        try:
            recording = record(self.scrapes, self.notes)
        except ExpositionError as error:
            raise SourceError(f"{self.name}: {error}") from None
        return observe_recording(recording, self.name, window, slo)


def observe_recording(
    recording: Recording, name: str, window: float | None, slo: Mapping[str, float]
) -> Observation:
    """The last ``window`` seconds of a recording, or all of it. Raises SourceError."""
    first, end = int(recording.times[0]), int(recording.times[-1])
    # One millisecond more than the samples span: Prometheus 3's windows are open on the left.
    start = first - 1 if window is None else max(first - 1, end - round(window * 1000))
    if (recording.times >= start).sum() < 2:
        raise SourceError(f"{name}: fewer than two scrapes in the last {window:g} s; widen --window")
    span = Span(start, end, subquery_step(end - start), recording.since_start)
    evaluator = ScrapeEvaluator.over(recording, span, slo)
    seen = _observation(name, evaluator, (end - start) / 1000, recording.notes)
    return replace(seen, since_start=recording.since_start)


class SeriesFile(Source):
    """A ``.prom`` or ``.prom.gz`` file of scrapes, each preceded by ``# scrape_unix_ms N``.

    Only scrapes of ``period`` count, where one is given.
    """

    def __init__(self, path: Path, period: Period | None = None) -> None:
        self.path = path
        self.name = str(path)
        self.period = period

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        """Raises SourceError for a file that cannot be read or holds no scrapes."""
        try:
            text, notes = read_series_text(self.path)
            scrapes = split_scrapes(text)
        except ExpositionError as error:
            message = str(error)
            raise SourceError(message if self.name in message else f"{self.name}: {message}") from None
        if self.period is not None:
            scrapes = _within(scrapes, self.period, self.name)
        return Scrapes(scrapes, self.name, notes).observe(window, slo)


def _within(scrapes: Sequence[tuple[int, str]], period: Period, name: str) -> list[tuple[int, str]]:
    """The scrapes of a period. Raises SourceError where there are fewer than two."""
    begin, end = min(time for time, _ in scrapes), max(time for time, _ in scrapes)
    try:
        first, last = period.bounds(end / 1000)
    except PeriodError as error:
        raise SourceError(f"{name}: {error}") from None
    inside = [scrape for scrape in scrapes if (first or 0.0) * 1000 <= scrape[0] <= last * 1000]
    if len(inside) < 2:
        raise SourceError(
            f"{name}: {len(inside)} scrape(s) between --since and --until; "
            f"the recording goes from {_clock(begin)} to {_clock(end)}"
        )
    return inside


def _clock(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, tz=UTC).isoformat(timespec="seconds")


class MetricsUrl(Source):
    """A server's /metrics page, scraped about once a second over the window (15 s unless said).

    Ctrl-C ends the watch early; what was scraped until then is judged.
    """

    DEFAULT_WINDOW_S = 15.0

    def __init__(
        self,
        url: str,
        *,
        connection: Connection = NO_LOGIN,
        interval: float = 1.0,
        progress: Callable[[float], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self.connection = _apart(_with_path(url, "/metrics"), connection)
        self.name = urlsplit(self.url).netloc
        self.interval = interval
        self.progress = progress
        self.sleep = sleep
        self._clock = UnixClock()

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        scrapes = self._watch(window if window is not None else self.DEFAULT_WINDOW_S)
        observation = Scrapes(scrapes, self.name).observe(None, slo)
        return Observation(
            observation.name,
            observation.evaluator,
            observation.family,
            observation.window_s,
            observation.kind,
            observation.notes,
            self._version(),
        )

    def _watch(self, window: float) -> list[tuple[int, str]]:
        self._clock = UnixClock()
        scrapes = [self.scrape()]
        begun = time.monotonic()
        try:
            while (elapsed := time.monotonic() - begun) < window:
                if self.progress is not None:
                    self.progress(elapsed)
                self.sleep(min(self.interval, window - elapsed))
                scrapes.append(self.scrape())
        except KeyboardInterrupt:
            if len(scrapes) < 2:
                raise
        return scrapes

    def scrape(self) -> tuple[int, str]:
        """(unix ms, exposition text) of now. Raises SourceError."""
        return self._clock.ms(), _get(self.url, self.connection)

    def _version(self) -> str | None:
        """vLLM and the bundled engine answer GET /version beside /metrics."""
        import requests

        from doctor.metrics.session import Session

        try:
            with Session(self.connection) as session:
                answer = session.get(
                    f"{self.url.rsplit('/', 1)[0]}/version", timeout=self.connection.within(TIMEOUT_S)
                )
            version = answer.json().get("version") if answer.ok else None
        except (requests.RequestException, ValueError, AttributeError):
            return None
        return version if isinstance(version, str) else None


class PrometheusSource(Source):
    """A live Prometheus (or what speaks its HTTP API), over the last ``window`` seconds (5 min unless said).

    ``selector`` is a PromQL matcher list, ``{job="vllm"}`` or ``job="vllm"``; ``at`` the window's end
    (unix s; None: now), or ``period`` says from when to when.
    """

    DEFAULT_WINDOW_S = 300.0

    def __init__(
        self,
        url: str,
        selector: str = "",
        at: float | None = None,
        period: Period | None = None,
        connection: Connection = NO_LOGIN,
    ) -> None:
        self.url, self.connection = _apart(_with_path(url, "").rstrip("/"), connection)
        self.name = urlsplit(self.url).netloc
        self.selector = selector.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")
        self.at = at
        self.period = period

    def observe(self, window: float | None, slo: Mapping[str, float]) -> Observation:
        from doctor.metrics.live import PrometheusEvaluator

        seconds, at = self._bounds(window if window is not None else self.DEFAULT_WINDOW_S)
        ms = round(seconds * 1000)
        promql = PromQL(ms, subquery_step(ms), self.selector, slo=slo)
        evaluator = PrometheusEvaluator(self._asker(at), promql)
        return _observation(self.name, evaluator, seconds, ())

    def _bounds(self, window: float) -> tuple[float, float]:
        """How long the window is, and where it ends (unix s). Raises PeriodError."""
        now = self.at if self.at is not None else time.time()
        if self.period is None:
            return window, now
        first, last = self.period.bounds(now)
        return window if first is None else last - first, last

    def _asker(self, at: float) -> Callable[[str], list[Mapping[str, Any]]]:
        import requests
        from prometheus_api_client import PrometheusApiClientException, PrometheusConnect

        from doctor.metrics.session import Session

        timeout = self.connection.within(QUERY_TIMEOUT_S)
        client = PrometheusConnect(
            self.url,
            session=Session(self.connection, retries=1),
            timeout=timeout,
            method="POST",
        )
        params = {"time": at}

        def ask(query: str) -> list[Mapping[str, Any]]:
            try:
                answer = client.custom_query(query, params=params)
            except PrometheusApiClientException as error:
                raise SourceError(
                    f"{self.url}: {self.connection.hide(_refusal(str(error), query, self.connection))}"
                ) from None
            except requests.RequestException as error:
                reason = _reason(error, timeout)
                raise SourceError(f"{self.url}: {reason}. Is this a Prometheus?") from None
            except (KeyError, TypeError, ValueError, RecursionError):
                raise SourceError(f"{self.url}: does not answer like Prometheus's HTTP API") from None
            if not isinstance(answer, list) or not all(map(_is_sample, answer)):
                raise SourceError(f"{self.url}: does not answer like Prometheus's HTTP API")
            return answer

        return ask


def _is_sample(element: Any) -> bool:
    """Whether an element of an answer is what Prometheus documents of an instant vector."""
    try:
        _, value = element["value"]
        float(value)
        return isinstance(element["metric"], Mapping)
    except (KeyError, TypeError, ValueError):
        return False


def _observation(name: str, evaluator: Evaluator, window_s: float, notes: Sequence[str]) -> Observation:
    known = find_family(evaluator.available)
    if known is None or not evaluator.groups:
        raise SourceError(f"{name}: no {LABELS} metric in the last {window_s:g} s")
    kind, family = known
    return Observation(name, evaluator, family, window_s, kind, tuple(notes))


def subquery_step(window_ms: int) -> int:
    """A subquery step that gives about 120 instants, in [0.1 s, 60 s]."""
    return min(max(round(window_ms / 120 / 100) * 100, 100), 60_000)


def _with_path(url: str, path: str) -> str:
    """``url`` with a scheme, and with ``path`` where it has none."""
    full = (url if "://" in url else f"http://{url}").strip()
    try:
        parts = urlsplit(full)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        known = False
    if not known or re.search(r"\s", full):
        shown = re.sub(r"^(\w+://)?.*@", r"\1…@", url)
        raise SourceError(f"{shown!r}: not an http(s) URL; write e.g. http://127.0.0.1:8000{path}")
    return full if parts.path.strip("/") else full.rstrip("/") + path


def _apart(url: str, connection: Connection) -> tuple[str, Connection]:
    """A URL without the credentials in it, and these as basic authentication."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, connection
    host = parts.netloc.rsplit("@", 1)[-1]
    if connection.authorization is None:
        password = unquote(parts.password or "")
        connection = replace(connection, user=unquote(parts.username), password=password)
    return urlunsplit(parts._replace(netloc=host)), connection


def _refusal(error: str, query: str, connection: Connection) -> str:
    """What an HTTP error of a Prometheus means."""
    if "Status Code 401" in error or "Status Code 403" in error:
        return connection.refused
    return f"Prometheus refused a query: {_short(error)}. Query: {_short(query)}"


def _short(text: str, most: int = 500) -> str:
    return text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"


def _get(url: str, connection: Connection) -> str:
    import requests

    from doctor.metrics.session import Session

    timeout = connection.within(TIMEOUT_S)
    try:
        with Session(connection) as session:
            answer = session.get(url, timeout=timeout)
    except (requests.RequestException, ValueError) as error:  # the latter for where a redirect leads
        reason = _reason(error, timeout)
        raise SourceError(f"{url}: {reason}. Is the server up, and is this its address?") from None
    if answer.status_code in (401, 403):
        raise SourceError(f"{url}: HTTP {answer.status_code}; {connection.refused}")
    if not answer.ok:
        raise SourceError(f"{url}: HTTP {answer.status_code}; is this the server's /metrics page?")
    return answer.text


def _reason(error: Exception, timeout: float) -> str:
    """What a requests exception means, in a few words."""
    import requests

    from doctor.metrics.session import MAX_ANSWER_BYTES, TooLarge

    if isinstance(error, requests.Timeout):
        return f"no answer within {timeout:g} s"
    if isinstance(error, requests.exceptions.SSLError):
        return (
            "its TLS certificate is not trusted here, or the handshake failed (--ca-file, --client-cert, "
            "--insecure)"
        )
    if isinstance(error, requests.ConnectionError):
        return "cannot connect"
    if isinstance(error, TooLarge):
        return f"its answer is larger than {MAX_ANSWER_BYTES >> 20} MiB"
    return f"request failed ({error.__class__.__name__})"
