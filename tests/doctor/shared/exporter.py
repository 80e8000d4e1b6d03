"""Test helper: an HTTP server on a loopback port that answers /metrics with one page after another."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Exporter:
    """``served`` counts the pages handed out; after the last page it repeats itself."""

    def __init__(self, pages: Sequence[str], version: str | None = None) -> None:
        self.pages = pages
        self.version = version
        self.served = 0
        self.address = ""

    def next_page(self) -> str:
        page = self.pages[min(self.served, len(self.pages) - 1)]
        self.served += 1
        return page


@contextmanager
def serve(exporter: Exporter) -> Iterator[Exporter]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.answer(200, exporter.next_page(), "text/plain; version=0.0.4")
            elif self.path == "/version" and exporter.version:
                self.answer(200, f'{{"version": "{exporter.version}"}}', "application/json")
            else:
                self.answer(404, "nothing here\n", "text/plain")

        def answer(self, status: int, text: str, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        exporter.address = f"127.0.0.1:{server.server_address[1]}"
        try:
            yield exporter
        finally:
            server.shutdown()
            thread.join()
