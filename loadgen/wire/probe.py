"""What a server says about itself before the load starts."""

from __future__ import annotations

import json
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from loadgen.wire.ask import ask
from loadgen.wire.http1 import MalformedMessage, build_request
from loadgen.wire.messages import Endpoint
from servers.connection import NO_LOGIN, Connection
from servers.errors import UserError

ANSWER_SECONDS = 10.0
TLS_HINT = (
    "is it https? Give --ca-file FILE to trust its certificate, --client-cert FILE if it asks for yours"
)


_NO_MODELS = "is this an OpenAI-compatible server? If it is, name the model with --model"


class Unreachable(UserError):
    """The server cannot be used; the message says what was tried, what happened and what to do."""


class NoModels(Unreachable):
    """The server answers, but lists no model."""


class UrlError(UserError):
    """Text that is no server's URL."""


@dataclass(frozen=True)
class Url:
    """A server's base URL, taken apart. ``prefix`` is the path before /v1, without a trailing slash."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, text: str) -> Url:
        """Raises UrlError."""
        full = text if "://" in text else f"http://{text}"
        problem = UrlError(f"{text!r} is no server URL: write e.g. http://127.0.0.1:8000")
        try:
            parts = urlsplit(full)
        except ValueError:  # half an IPv6 address
            raise problem from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise problem
        if parts.username is not None or parts.query:
            raise UrlError(f"{text!r}: no user name or query belongs here; give a key with --api-key")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise UrlError(f"{text!r}: the port is not a number from 1 to 65535") from None
        path = parts.path.rstrip("/")
        return cls(parts.scheme, parts.hostname, port, path.removesuffix("/v1"))

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.prefix}"


@dataclass(frozen=True)
class ServerInfo:
    """``max_model_len`` and ``version`` are None where the server does not say."""

    model: str
    max_model_len: int | None
    version: str | None


def reach(url: Url, connection: Connection = NO_LOGIN, timeout: float = ANSWER_SECONDS) -> Endpoint:
    """The first address of the host that accepts a connection. Raises Unreachable."""
    timeout = connection.within(timeout)
    try:
        addresses = socket.getaddrinfo(url.host, url.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"{url}: the name {url.host!r} cannot be resolved ({error.strerror})") from None
    problem = "no address"
    for _, _, _, _, address in addresses:
        try:
            socket.create_connection((str(address[0]), url.port), timeout).close()
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            name = url.host if url.scheme == "https" else None
            return Endpoint(str(address[0]), url.port, name, connection.tls)
    raise Unreachable(f"{url}: {problem}; is the server running, and is the port right?")


def probe(url: Url, connection: Connection = NO_LOGIN) -> ServerInfo:
    """Ask /v1/models (and /version). Raises Unreachable, NoModels for an answer that names none."""
    status, body = _get(url, "/v1/models", connection)
    if status in (401, 403):
        raise Unreachable(f"{url}: HTTP {status} for /v1/models; {connection.refused}")
    if status != 200:
        raise NoModels(f"{url}: HTTP {status} for /v1/models; {_NO_MODELS}")
    try:
        first = json.loads(body)["data"][0]
        model, length = str(first["id"]), first.get("max_model_len")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise NoModels(f"{url}: /v1/models lists no model; {_NO_MODELS}") from None
    return ServerInfo(
        model, length if type(length) is int and length > 0 else None, _version(url, connection)
    )


def _version(url: Url, connection: Connection) -> str | None:
    try:
        status, body = _get(url, "/version", connection)
        answer = json.loads(body) if status == 200 else None
    except (Unreachable, ValueError, RecursionError):
        return None
    return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None


def _get(url: Url, path: str, connection: Connection) -> tuple[int, bytes]:
    timeout = connection.within(ANSWER_SECONDS)
    headers = {**connection.sent(), "Connection": "close"}
    message = build_request(url.prefix + path, url.netloc, b"", headers, "GET")
    try:
        return ask(
            url.host, url.port, message, timeout, connection.tls.context() if url.scheme == "https" else None
        )
    except ssl.SSLError as error:
        raise Unreachable(f"{url}: TLS: {error.reason or error}; {TLS_HINT}") from None
    except TimeoutError:
        raise Unreachable(f"{url}: no answer to GET {path} within {timeout:g} s") from None
    except (OSError, MalformedMessage) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise Unreachable(f"{url}: {problem}; is the server running, and is the port right?") from None
