"""The HTTP session behind every source. Imports requests: only to be imported where something is asked."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import InsecureRequestWarning
from urllib3.util.retry import Retry

from servers.connection import Connection

MAX_ANSWER_BYTES = 256 << 20
"""Bytes of an answer: a hundred servers' metrics are a few MB."""


class TooLarge(requests.RequestException):
    """An answer that does not end."""


class Session(requests.Session):
    """A POST carries its parameters as a form, since a query for many signals is too long for a URL; a server
    that takes no POST is asked by GET. ``timeout`` holds for the whole answer, not for each piece of it."""

    def __init__(self, connection: Connection, retries: int = 0) -> None:
        super().__init__()
        tls = connection.tls
        self.verify = str(tls.ca_file) if tls.ca_file is not None else tls.verify
        if tls.cert_file is not None:
            self.cert = (str(tls.cert_file), str(tls.key_file or tls.cert_file))
        self._own = dict(connection.headers)
        self.headers.update(self._own)
        self._patient = _Patient(max_retries=Retry(total=retries, backoff_factor=0, read=False))
        if connection.authorization is not None:
            self.auth = _Login(connection.authorization)

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Where a redirect leads to another host, headers of ours stay behind, as a key does."""
        super().rebuild_auth(prepared_request, response)
        if self.should_strip_auth(str(response.request.url), str(prepared_request.url)):
            for name in self._own:
                prepared_request.headers.pop(name, None)

    def request(self, method: Any, url: Any, *args: Any, **given: Any) -> requests.Response:
        given.setdefault("verify", self.verify)  # or $REQUESTS_CA_BUNDLE would take its place
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InsecureRequestWarning)  # asked for by --insecure
            if method != "POST":
                return super().request(method, url, *args, **given)
            params = given.pop("params", None)
            answer = super().request("POST", url, *args, **{**given, "data": params})
            if answer.status_code == requests.codes.method_not_allowed:
                return super().request("GET", url, *args, **{**given, "params": params})
            return answer

    def get_adapter(self, url: str | bytes) -> HTTPAdapter:
        if str(url).lower().startswith(("http://", "https://")):
            return self._patient
        raise requests.exceptions.InvalidSchema(f"no http(s) URL: {url!r}")


class _Patient(HTTPAdapter):
    """Gives an answer so many seconds and bytes in all."""

    def send(self, request: requests.PreparedRequest, *args: Any, **given: Any) -> requests.Response:
        begun, timeout = time.monotonic(), given.get("timeout")
        answer = super().send(request, *args, **given)
        answer.raw = _Limited(answer.raw, begun + timeout if timeout else None)
        return answer


class _Limited:
    """A urllib3 response whose body ends at a time and a size."""

    def __init__(self, response: Any, deadline: float | None) -> None:
        self._response, self._deadline = response, deadline

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def stream(self, amt: int, decode_content: bool = True) -> Iterator[bytes]:
        """Whatever has come, as soon as it has come."""
        size = 0
        while piece := self._response.read1(amt, decode_content=decode_content):
            size += len(piece)
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise requests.Timeout
            if size > MAX_ANSWER_BYTES:
                raise TooLarge
            yield piece


class _Login(requests.auth.AuthBase):
    """As an ``auth``: a mere header would give way to ~/.netrc."""

    def __init__(self, authorization: str) -> None:
        self._authorization = authorization

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = self._authorization
        return request
