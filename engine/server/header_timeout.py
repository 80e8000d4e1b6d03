"""uvicorn's HTTP protocol, with a limit on how long a client may take to send the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_TIMEOUT_SECONDS = 60
"""From the connection, or the first byte of a further request, to the end of the head."""
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HeaderTimeoutProtocol(HttpToolsProtocol):
    """Closes a connection when a request's head is late; otherwise silent clients could keep it forever."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._alarm is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._alarm = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self._close_late)

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _close_late(self) -> None:
        self._alarm = None
        if not self.transport.is_closing():
            self.transport.write(TOO_LATE)
            self.transport.close()
