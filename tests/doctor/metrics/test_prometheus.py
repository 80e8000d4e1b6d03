"""A real Prometheus gives the same signals, and the same diagnosis, as the recorded scrapes themselves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from exporter import Exporter, serve
from live_prometheus import free_port, load_recording, needs_prometheus, prometheus
from recordings import needs_recordings, scrapes
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.metrics.period import period
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import PrometheusSource, Scrapes
from servers.errors import SourceError
from servers.kinds import LABELS
from servers.metrics.exposition import record
from servers.reading import Missing, Number

pytestmark = needs_prometheus

NAMES = ("kv-starved", "overload", "spec-ngram-bad", "long-prefill-small-chunks")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that holds several recordings, each under its own ``recording`` label."""
    directory = tmp_path_factory.mktemp("prometheus")
    for name in NAMES:
        load_recording(record(scrapes(name)), directory, {"recording": name, "instance": name})
    with prometheus(directory) as url:
        yield url


@needs_recordings
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 30.0])
def test_every_signal_agrees_with_prometheus(loaded: str, name: str, window: float | None) -> None:
    recorded = Scrapes(scrapes(name), name).observe(window, DEFAULTS)
    source = PrometheusSource(loaded, f'recording="{name}"', at=scrapes(name)[-1][0] / 1000)
    live = source.observe(recorded.window_s, DEFAULTS)
    (group,), (live_group,) = recorded.evaluator.groups, live.evaluator.groups
    assert dict(live_group.labels) == {**dict(group.labels), "instance": name, "recording": name}
    compared = 0
    for signal in SIGNALS.values():
        ours = recorded.evaluator.read(signal)[group]
        theirs = live.evaluator.read(signal)[live_group]
        if not isinstance(ours, Number) or not isinstance(theirs, Number):
            assert isinstance(ours, Missing), signal.name
            assert isinstance(theirs, Missing), signal.name
            assert ours.kind == theirs.kind, signal.name
            continue
        assert theirs.point == pytest.approx(ours.point, rel=0.01, abs=1e-9), signal.name
        assert (theirs.low, theirs.high) == pytest.approx((ours.low, ours.high), rel=0.01, abs=1e-9), (
            signal.name
        )
        compared += 1
    assert compared >= 40


@needs_recordings
def test_the_diagnosis_is_the_same_from_prometheus(loaded: str) -> None:
    recorded = diagnose(Scrapes(scrapes("overload")), {})
    end = scrapes("overload")[-1][0] / 1000
    live = diagnose(PrometheusSource(loaded, '{recording="overload"}', at=end), {}, window=recorded.window_s)
    assert [f.id for f in live.findings] == [f.id for f in recorded.findings]
    assert [f.suppressed_by for f in live.findings] == [f.suppressed_by for f in recorded.findings]
    assert {f.instance for f in live.findings} == {"overload"}
    gone_by = period(f"-{recorded.window_s}s", str(end))
    past = diagnose(PrometheusSource(loaded, 'recording="overload"', period=gone_by), {})
    assert [f.id for f in past.findings] == [f.id for f in recorded.findings]


def test_a_live_prometheus_over_two_servers(tmp_path: Path) -> None:
    """One exporter replays a server with a sequence cap, the other a healthy one; Prometheus scrapes both."""
    capped = Server(running=2, waiting=9, kv=0.02)
    pages = [[page for _, page in server.scrapes(count=60)] for server in (capped, Server())]
    with (
        serve(Exporter(pages[0])) as sick,
        serve(Exporter(pages[1])) as well,
        prometheus(tmp_path, [sick.address, well.address], interval="250ms") as url,
    ):
        while min(sick.served, well.served) < 6:
            time.sleep(0.2)
        found = diagnose(PrometheusSource(url, 'job="vllm"'), {"max_num_seqs": 2}, window=20)
        assert found.engines == tuple(sorted([sick.address, well.address]))
        assert [(f.id, f.instance) for f in found.findings if not f.suppressed_by] == [
            ("seq-cap", sick.address)
        ]
        for evidence in found.findings[0].evidence:
            assert 'job="vllm"' in evidence.query

        with pytest.raises(SourceError, match="Prometheus refused a query"):
            diagnose(PrometheusSource(url, "job=vllm"), {}, window=20)
        with pytest.raises(SourceError, match=rf"no {LABELS} metric in the last 20 s"):
            diagnose(PrometheusSource(url, 'job="other"'), {}, window=20)


def test_an_unreachable_prometheus_is_said_in_words() -> None:
    with pytest.raises(SourceError, match=r"cannot connect\. Is this a Prometheus\?"):
        diagnose(PrometheusSource(f"http://127.0.0.1:{free_port()}"), {})


def test_another_server_is_no_prometheus() -> None:
    with (
        serve(Exporter(["up 1\n"])) as stranger,
        pytest.raises(SourceError, match=r"Prometheus refused a query|does not answer like Prometheus"),
    ):
        diagnose(PrometheusSource(stranger.address), {})
