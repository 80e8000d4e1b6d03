"""Files that hang or never end, servers that answer anything: refused in words, and without a secret."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics import session, sources
from doctor.metrics.benchmark import BenchmarkResult
from doctor.metrics.log_source import LogSource
from doctor.metrics.sources import MetricsUrl, PrometheusSource, SeriesFile
from doctor.proof.canary import CanaryError, read_cure
from servers import input_file
from servers.connection import Connection, read_connection
from servers.errors import OptionError, SourceError
from servers.input_file import read_input

SECRET = "t0ken-nobody-may-see"
GOOD = "".join(f"# scrape_unix_ms {at}\n{page}" for at, page in Server().scrapes())


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def binary(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\0" * 100_000))


@pytest.mark.parametrize("make", [fifo, loop, binary, Path.mkdir, Path.touch])
@pytest.mark.parametrize("source", [SeriesFile, LogSource, BenchmarkResult])
def test_what_is_no_file_of_use_is_refused(
    make: Callable[[Path], object], source: Callable[[Path], sources.Source], tmp_path: Path
) -> None:
    make(path := tmp_path / "input")
    with pytest.raises(SourceError, match="input: ") as refused:
        diagnose(source(path))
    assert "Errno" not in str(refused.value) or source is BenchmarkResult


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
def test_a_device_is_no_file(name: str) -> None:
    for source in (SeriesFile, LogSource, BenchmarkResult):
        with pytest.raises(SourceError, match="neither a file nor a pipe"):
            diagnose(source(Path(name)))
    with pytest.raises(OptionError, match="neither a file nor a pipe"):
        read_connection({}, api_key_file=Path(name))


def test_a_pipe_into_which_somebody_writes_is_read(tmp_path: Path) -> None:
    """As of ``--series <(zcat …)``."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as end:
            end.write(GOOD.encode())

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = diagnose(SeriesFile(Path(f"/dev/fd/{reading}")), {})
    finally:
        writer.join()
        os.close(reading)
    assert found.healthy


def test_what_never_ends_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_file, "LARGEST", 10_000)
    path = tmp_path / "large"
    for content in (b"a" * 20_000, gzip.compress(b"a" * 20_000)):
        path.write_bytes(content)
        with pytest.raises(SourceError, match="cut it first"):
            diagnose(SeriesFile(path))
    path.write_bytes(b"a" * 10_000)
    assert len(read_input(path)) == 10_000


def test_json_without_a_bottom_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(SourceError, match="neither JSON nor a table"):
        diagnose(BenchmarkResult(path))
    with pytest.raises(CanaryError, match="not what vtune doctor"):
        read_cure(str(path), None, None)


class Strange(http.server.BaseHTTPRequestHandler):
    """Answers by what its path says; notes who asked with what."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, str | None]]
    elsewhere = ""
    enough: threading.Event

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers.get("Authorization")))
        kind = self.path.split("/")[1]
        if kind == "redirect":
            self.answer(302, b"", Location=f"{self.elsewhere}/metrics")
        elif kind == "nowhere":
            self.answer(302, b"", Location="http://[::")
        elif kind == "echo":
            self.answer(500, str(self.headers.get("Authorization")).encode() + b"x" * 5000)
        elif kind in ("drip", "endless"):
            self.pour(b"a" if kind == "drip" else b"a" * 4096, 0.05 if kind == "drip" else 0.0)
        elif kind == "no-signal":
            self.answer(200, vector({"metric": dict(NAMED, instance="a:1"), "value": [1, "2"]}).encode())
        elif kind in ANSWERS:
            self.answer(200, ANSWERS[kind].encode())
        else:
            self.answer(200, Server().page(len(self.seen), 0.0).encode())

    def pour(self, piece: bytes, pause: float) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(10**9))
        self.end_headers()
        try:
            while not self.enough.wait(pause):
                self.wfile.write(piece)
        except OSError:
            pass
        self.close_connection = True

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def vector(*elements: object) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": elements}})


NAMED = {"__name__": "vllm:num_requests_running"}
ANSWERS = {
    "number": vector({"metric": NAMED, "value": [1, "abc"]}),
    "no-value": vector({"metric": NAMED}),
    "matrix": vector({"metric": NAMED, "values": [[1, "2"]]}),
    "numbers": vector(1, 2),
    "no-labels": vector({"metric": None, "value": [1, "2"]}),
    "text": "hello",
    "null": "null",
    "deep": '{"data": {"result": ' + "[" * 100_000,
}


@contextmanager
def strange(elsewhere: str = "") -> Iterator[tuple[str, type[Strange]]]:
    enough = threading.Event()
    handler = type("OwnStrange", (Strange,), {"seen": [], "elsewhere": elsewhere, "enough": enough})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", handler
        finally:
            enough.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_does_not_answer_like_a_prometheus_is_said_to(kind: str) -> None:
    with (
        strange() as (url, _),
        pytest.raises(SourceError, match=r"does not answer like|Is this a Prometheus"),
    ):
        diagnose(PrometheusSource(f"{url}/{kind}"), {})


def test_a_vector_without_our_label_is_no_figure() -> None:
    """Somebody between us and Prometheus who drops labels: nothing is known, and nothing breaks."""
    with strange() as (url, _):
        found = diagnose(PrometheusSource(f"{url}/no-signal"), {})
    assert (found.findings, found.healthy) == ((), False)


def test_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "TIMEOUT_S", 240.0)
    monkeypatch.setattr(session, "MAX_ANSWER_BYTES", 1 << 20)
    with strange() as (url, _):
        with pytest.raises(SourceError, match="its answer is larger than 1 MiB"):
            diagnose(MetricsUrl(f"{url}/endless"))
        monkeypatch.setattr(sources, "TIMEOUT_S", 1.0)
        with pytest.raises(SourceError, match="no answer within 1 s"):
            diagnose(MetricsUrl(f"{url}/drip"))


def test_a_redirect_to_another_host_does_not_get_the_token() -> None:
    with strange() as (theirs, other):
        away = theirs.replace("127.0.0.1", "localhost")
        with strange(away) as (url, own):
            source = MetricsUrl(f"{url}/redirect", interval=0.05, connection=Connection(api_key=SECRET))
            assert diagnose(source, {}, window=0.2).findings == ()
    assert {authorization for _, authorization in own.seen} == {f"Bearer {SECRET}"}
    assert {authorization for _, authorization in other.seen} == {None}


def test_a_redirect_to_nowhere_is_said_to_be_one() -> None:
    with strange() as (url, _), pytest.raises(SourceError, match=r"/nowhere: .*is this its address\?"):
        diagnose(MetricsUrl(f"{url}/nowhere"))


@pytest.mark.parametrize("connection", [Connection(api_key=SECRET), Connection(user="u", password=SECRET)])
def test_a_server_that_repeats_the_secret_is_not_quoted_with_it(connection: Connection) -> None:
    with strange() as (url, _), pytest.raises(SourceError, match="refused a query") as refused:
        diagnose(PrometheusSource(f"{url}/echo", connection=connection), {})
    assert SECRET not in str(refused.value)
    assert b64encode(f"u:{SECRET}".encode()).decode() not in str(refused.value)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://host", "http://", "", " ", "http://a b/", "http://a\nb", "http://[::1", "http://h:port"),
        *(
            "http://h:99999",
            "http://h:0",
            f"ftp://u:{SECRET}@h",
            f"http://u:{SECRET}/x@h",
            f"u:{SECRET}@h:port",
        ),
    ],
)
def test_what_is_no_url_is_refused_without_its_password(url: str) -> None:
    for source in (MetricsUrl, PrometheusSource):
        with pytest.raises(SourceError, match=r"not an http\(s\) URL; write e\.g\.") as refused:
            source(url)
        assert SECRET not in str(refused.value)
