"""One question at a time: a request over a connection of its own, blocking, with an end in time and size."""

from __future__ import annotations

import socket
import ssl
from time import monotonic

from loadgen.wire.http1 import ResponseParser

_READ_BYTES = 1 << 16


def ask(
    host: str, port: int, message: bytes, timeout: float, tls: ssl.SSLContext | None
) -> tuple[int, bytes]:
    """Send ``message``; returns the answer's status and body. ``timeout``: seconds for all of it.

    Raises OSError, TimeoutError and ssl.SSLError among them; MalformedMessage.
    """
    end = monotonic() + timeout
    body: list[bytes] = []
    parser = ResponseParser(body.append)
    peer = socket.create_connection((host, port), timeout)
    try:
        if tls is not None:
            peer = tls.wrap_socket(peer, server_hostname=host)
        peer.sendall(message)
        while not parser.complete:
            left = end - monotonic()
            if left <= 0:
                raise TimeoutError
            peer.settimeout(left)
            data = peer.recv(_READ_BYTES)
            if data:
                parser.feed(data)
            elif parser.ends_with_connection:
                break
            else:
                raise ConnectionError("closed before the answer was complete")
    finally:
        peer.close()
    return parser.status, b"".join(body)
