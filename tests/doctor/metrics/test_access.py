"""Behind a password, a token or TLS: what gets in, what is refused in words, and no secret is printed."""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from live_prometheus import load_recording, needs_prometheus, prometheus
from synthetic_server import Server
from typer.testing import CliRunner

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.sources import MetricsUrl, PrometheusSource
from servers.connection import Connection, Tls
from servers.errors import SourceError
from servers.kinds import LABELS
from servers.metrics.exposition import record
from vtune_cli import app

SECRET = "s3cret-of-this-test"
PAGES = Server(running=2, waiting=9, kv=0.02).scrapes()
AT = PAGES[-1][0] / 1000
HASH = "$2b$04$abcdefghijklmnopqrstuuoD8yw7MmybLKVooaTGGZAt3HXugv2.a"
"""bcrypt of "test", of the least cost."""
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subject = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(key)]
    command = ["openssl", "req", "-x509", *made, "-out", str(cert), *subject]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@needs_openssl
@needs_prometheus
def test_a_prometheus_behind_tls_and_a_password(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    load_recording(record(PAGES), tmp_path, {"instance": "a:1"})
    web = tmp_path / "web.yml"
    tls = {"cert_file": str(cert), "key_file": str(key)}
    web.write_text(json.dumps({"tls_server_config": tls, "basic_auth_users": {"doctor": HASH}}))
    with prometheus(tmp_path, web=web) as plain:
        url = plain.replace("http:", "https:")
        for connection in (
            Connection(user="doctor", password="test", tls=Tls(cert)),
            Connection(user="doctor", password="test", tls=Tls(verify=False)),
        ):
            found = diagnose(
                PrometheusSource(url, at=AT, connection=connection), {"max_num_seqs": 2}, window=60
            )
            assert found.findings[0].id == "seq-cap"
        inside = url.replace("https://", "https://doctor:test@")
        found = diagnose(
            PrometheusSource(inside, at=AT, connection=Connection(tls=Tls(cert))),
            {"max_num_seqs": 2},
            window=60,
        )
        assert "test@" not in json.dumps(found.to_json())
        with pytest.raises(SourceError, match=r"TLS certificate is not trusted here.*--ca-file"):
            diagnose(PrometheusSource(url, at=AT), {}, window=60)
        wrong = Connection(user="doctor", password=SECRET, tls=Tls(cert))
        with pytest.raises(
            SourceError, match=r"it refuses who asks; give its key with --api-key-file"
        ) as refused:
            diagnose(PrometheusSource(url, at=AT, connection=wrong), {}, window=60)
        assert SECRET not in str(refused.value)


class Guard(http.server.BaseHTTPRequestHandler):
    """Answers whoever has the token: /metrics with a page, queries with an empty vector."""

    methods: list[str]
    queries: list[str]
    takes_post = True
    asked = 0

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {SECRET}":
            self.answer(401, "who are you?")
        elif self.path == "/metrics":
            type(self).asked += 1
            self.answer(200, PAGES[min(self.asked, len(PAGES) - 1)][1])
        else:
            self.methods.append(self.command)
            self.answer(200, '{"status": "success", "data": {"resultType": "vector", "result": []}}')

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if not self.takes_post:
            self.answer(405, "GET only")
            return
        self.queries += parse_qs(body)["query"]
        self.do_GET()

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def guarded(certificate: tuple[Path, Path] | None = None) -> Iterator[tuple[str, type[Guard]]]:
    handler = type("OwnGuard", (Guard,), {"methods": [], "queries": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        scheme = "http" if certificate is None else "https"
        try:
            yield f"{scheme}://127.0.0.1:{server.server_address[1]}", handler
        finally:
            server.shutdown()
            thread.join()


@needs_openssl
def test_a_metrics_page_behind_tls_and_a_token(certificate: tuple[Path, Path]) -> None:
    with guarded(certificate) as (url, _):
        source = MetricsUrl(
            url, interval=0.05, connection=Connection(api_key=SECRET, tls=Tls(certificate[0]))
        )
        found = diagnose(source, {"max_num_seqs": 2}, window=0.3)
        assert found.findings[0].id == "seq-cap"
        with pytest.raises(SourceError, match="HTTP 401; it wants to know who asks; give its key"):
            diagnose(MetricsUrl(url, connection=Connection(tls=Tls(certificate[0]))), {}, window=0.1)


@pytest.mark.parametrize("takes_post", [True, False])
def test_a_prometheus_is_asked_by_a_form_with_the_token(takes_post: bool) -> None:
    with guarded() as (url, handler):
        handler.takes_post = takes_post
        with pytest.raises(SourceError, match=f"no {LABELS} metric"):
            diagnose(PrometheusSource(url, 'job="x"', connection=Connection(api_key=SECRET)), {}, window=60)
        assert handler.methods == ["POST" if takes_post else "GET"]
        if takes_post:
            assert 'job="x"' in handler.queries[0]


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "export", "alerts"]])
def test_the_commands_take_them(command: list[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "gone")
    result = CliRunner().invoke(app, [*command, "--prometheus", "127.0.0.1:9", "--token-file", missing])
    assert result.exit_code == 2
    assert "--api-key-file" in result.stderr
    assert "cannot be read" in result.stderr
