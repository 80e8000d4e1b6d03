"""The few blocking requests around a load: health, model, probe, metrics. The load has its own client."""

from __future__ import annotations

import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any

from loadgen.wire.probe import MAX_ANSWER, Url


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
        except ValueError:
            return None


class Http:
    """One server; a new connection for each request, no proxies. Raises UrlError for a bad URL."""

    def __init__(self, url: str, api_key: str | None = None, *, verify_tls: bool = True) -> None:
        self._url = Url.parse(url)
        self.url, self.api_key = str(self._url), api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        if self._tls and not verify_tls:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE

    def get(self, path: str, timeout: float) -> HttpAnswer:
        """GET ``path``. ``timeout`` is in seconds, for each wait on the socket. Raises NoAnswer."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: object, timeout: float) -> HttpAnswer:
        """POST ``body`` as JSON. Raises NoAnswer."""
        return self._request("POST", path, json.dumps(body), timeout)

    def _request(self, method: str, path: str, body: str | None, timeout: float) -> HttpAnswer:
        headers = {**self._headers, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connect(timeout)
        try:
            connection.request(method, self._url.prefix + path, body, headers)
            response = connection.getresponse()
            return HttpAnswer(response.status, response.read(MAX_ANSWER).decode(errors="replace"))
        except TimeoutError:
            raise NoAnswer(f"{self.url}{path}: no answer in {timeout:g} s", timed_out=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoAnswer(f"{self.url}{path}: {reason}") from None
        finally:
            connection.close()

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        host, port = self._url.host, self._url.port
        if self._tls:
            return http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=timeout)
