"""The few blocking requests around a load: health, model, probe, metrics. The load has its own client."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


class Unreachable(Exception):
    """No HTTP answer: refused, timed out, closed, or not HTTP. ``timed_out`` tells a hang from the rest."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(message)


@dataclass(frozen=True)
class Answer:
    status: int
    body: str

    def json(self) -> Any:
        """The body parsed; None when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Http:
    """One server; a new connection for each request, no proxies. ``url`` may have a path, or end in /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = base_url(url)
        parts = urlsplit(self.url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str, timeout: float) -> Answer:
        """GET ``path``. ``timeout`` is in seconds, for each wait on the socket. Raises Unreachable."""
        return self._request("GET", path, None, timeout)

    def post(self, path: str, body: object, timeout: float) -> Answer:
        """POST ``body`` as JSON. Raises Unreachable."""
        return self._request("POST", path, json.dumps(body), timeout)

    def _request(self, method: str, path: str, body: str | None, timeout: float) -> Answer:
        headers = {**self._headers, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            return Answer(response.status, response.read().decode(errors="replace"))
        except TimeoutError:
            raise Unreachable(f"{self.url}{path}: no answer in {timeout:g} s", timed_out=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise Unreachable(f"{self.url}{path}: {reason}") from None
        finally:
            connection.close()


def base_url(url: str) -> str:
    """``host:8000`` -> ``http://host:8000``; a trailing slash and ``/v1`` go. Raises ValueError."""
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no server address: write e.g. http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"
