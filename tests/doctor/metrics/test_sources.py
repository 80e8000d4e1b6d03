"""A /metrics page watched for a while."""

from __future__ import annotations

import time

import pytest
from exporter import Exporter, serve
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.metrics.sources import MetricsUrl, Scrapes
from servers.errors import SourceError
from servers.kinds import LABELS

PAGES = [page for _, page in Server(running=2, waiting=9, kv=0.02).scrapes(count=60)]


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
def test_a_metrics_page_is_watched_and_judged(path: str) -> None:
    with serve(Exporter(PAGES, version="0.32.0")) as server:
        source = MetricsUrl(f"http://{server.address}{path}", interval=0.1)
        found = diagnose(source, {"max_num_seqs": 2}, window=0.5)
    assert [f.id for f in found.findings if not f.suppressed_by] == ["seq-cap"]
    assert found.version == "0.32.0"
    assert found.findings[0].instance == server.address


def test_the_watch_may_be_cut_short() -> None:
    """Ctrl-C ends it; what was scraped until then is judged."""
    naps: list[float] = []

    def interrupted(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 4:
            raise KeyboardInterrupt
        time.sleep(0.1)

    with serve(Exporter(PAGES)) as server:
        source = MetricsUrl(server.address, sleep=interrupted)
        found = diagnose(source, {"max_num_seqs": 2}, window=3600)
    assert [f.id for f in found.findings if not f.suppressed_by] == ["seq-cap"]


def test_a_watch_cut_short_at_once_has_nothing_to_judge() -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with serve(Exporter(PAGES)) as server, pytest.raises(KeyboardInterrupt):
        diagnose(MetricsUrl(server.address, sleep=interrupted), {})


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://127.0.0.1:9", "cannot connect. Is the server up"),
        ("ftp://127.0.0.1", "not an http"),
        ("http://", "not an http"),
        ("http:///metrics", "not an http"),
    ],
    ids=["nobody listens", "another scheme", "no host", "only a path"],
)
def test_an_address_of_no_use_is_refused_in_words(url: str, complaint: str) -> None:
    with pytest.raises(SourceError, match=complaint):
        diagnose(MetricsUrl(url), {}, window=0.1)


def test_a_page_without_server_metrics_is_refused_in_words() -> None:
    with (
        serve(Exporter(["process_cpu_seconds_total 1.0\n"])) as server,
        pytest.raises(SourceError, match=rf"no {LABELS} metric .* process_cpu_seconds_total"),
    ):
        diagnose(MetricsUrl(server.address, interval=0.05), {}, window=0.1)


def test_an_error_page_is_refused_in_words() -> None:
    with serve(Exporter(PAGES)) as server, pytest.raises(SourceError, match="HTTP 404"):
        diagnose(MetricsUrl(f"{server.address}/other"), {}, window=0.1)


def test_a_window_without_two_scrapes_is_refused() -> None:
    with pytest.raises(SourceError, match=r"fewer than two scrapes in the last 1 s; widen --window"):
        diagnose(Scrapes(Server().scrapes()), {}, window=1)
