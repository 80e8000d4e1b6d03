"""The few blocking requests around a load: health, model, probe, metrics. The load has its own client."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from typing import Any

from loadgen.wire.ask import ask
from loadgen.wire.http1 import MalformedMessage, build_request
from loadgen.wire.probe import TLS_HINT, Url
from servers.connection import NO_LOGIN, Connection


class NoAnswer(Exception):
    """No HTTP answer: refused, timed out, closed, or not HTTP. ``timed_out`` tells a hang from the rest."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(message)


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    body: str

    def json(self) -> Any:
        """The body parsed; None when it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None


class Http:
    """One server; a new connection for each request, no proxies. Raises UrlError for a bad URL."""

    def __init__(self, url: str, connection: Connection = NO_LOGIN) -> None:
        self._url = Url.parse(url)
        self.url, self.connection = str(self._url), connection
        self._tls = connection.tls.context() if self._url.scheme == "https" else None

    def get(self, path: str, timeout: float) -> HttpAnswer:
        """GET ``path``. ``timeout``: seconds for the whole answer, unless the connection has its own.

        Raises NoAnswer.
        """
        return self._request("GET", path, b"", self.connection.within(timeout))

    def post(self, path: str, body: object, timeout: float) -> HttpAnswer:
        """POST ``body`` as JSON. Raises NoAnswer."""
        return self._request("POST", path, json.dumps(body).encode(), timeout)

    def _request(self, method: str, path: str, body: bytes, timeout: float) -> HttpAnswer:
        headers = {**self.connection.sent(), "Connection": "close"}
        if body:
            headers["Content-Type"] = "application/json"
        url = self._url
        message = build_request(url.prefix + path, url.netloc, body, headers, method)
        try:
            status, content = ask(url.host, url.port, message, timeout, self._tls)
        except TimeoutError:
            raise NoAnswer(f"{self.url}{path}: no answer in {timeout:g} s", timed_out=True) from None
        except ssl.SSLError as error:
            raise NoAnswer(f"{self.url}: TLS: {error.reason or error}; {TLS_HINT}") from None
        except (OSError, MalformedMessage) as error:
            raise NoAnswer(f"{self.url}{path}: {getattr(error, 'strerror', None) or error}") from None
        text = content.decode(errors="replace")
        return HttpAnswer(status, text if status == 200 else self.connection.hide(text))
