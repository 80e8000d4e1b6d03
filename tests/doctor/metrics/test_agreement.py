"""Every signal, asked of a Prometheus and computed from the same scrapes: within 1 %, also with resets, gaps
and few scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from live_prometheus import load_recordings, needs_prometheus, prometheus
from synthetic_server import Server

from doctor.diagnosis.diagnose import diagnose
from doctor.diagnosis.fleet import FIGURES
from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.metrics.evaluators import Group
from doctor.metrics.live import Ask
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Observation, PrometheusSource, Scrapes, observe_recording
from servers.metrics.exposition import Recording, record
from servers.reading import Number, Reading

pytestmark = needs_prometheus

START_MS = 1_700_000_000_000
BUSY = Server(
    running=lambda t: 3 + 9 * t,
    waiting=lambda t: max(0.0, 8 * t - 2),
    kv=lambda t: 0.3 + 0.69 * t,
    counters={"preemptions": 1, "drafts": 40, "draft_tokens": 160, "accepted_tokens": 90, "prefix_hits": 700},
    histograms={
        "ttft": {0.03: 3, 0.3: 5, 1.7: 2},
        "itl": {0.004: 103, 0.03: 811, 0.09: 79, 1.6: 19},
        "tpot": {0.03: 7, 0.18: 4},
        "queue_time": {0.0: 6, 0.7: 4},
        "prompt_length": {40.0: 5, 300.0: 3, 1800.0: 2},
        "prefill_length": {40.0: 6, 300.0: 3, 1800.0: 1},
        "generation_length": {90.0: 10},
        "iteration_tokens": {60.0: 90, 900.0: 10},
        "request_preemptions": {0.0: 9, 2.0: 1},
    },
)


def steps(count: int, seed: int) -> list[int]:
    """Work done by the time of each scrape: more in one interval than in the next."""
    chance, done = Random(seed), 1
    return [done := done + chance.randrange(1, 6) for _ in range(count)]


def restarted(work: Sequence[int]) -> list[int]:
    half = len(work) // 2
    return [*work[:half], *(done - work[half] + 1 for done in work[half:])]


def every(seconds: int, count: int) -> list[int]:
    """Scrape times, with the jitter of a real Prometheus."""
    chance = Random(seconds)
    return [START_MS + 1000 * seconds * number + chance.randrange(300) for number in range(count)]


Work = Callable[[list[int]], list[int]]
VARIANTS: Mapping[str, tuple[list[int], Work]] = {
    "15s": (every(15, 21), list),
    "60s": (every(60, 11), list),
    "gaps": ([at for n, at in enumerate(every(15, 25)) if n not in (1, 9, 10, 11, 12, 13, 22)], list),
    "restart": (every(15, 21), restarted),
    "few": (every(60, 3), list),
}


def scrapes(variant: str) -> list[tuple[int, str]]:
    """Two engines on hosts of their own, each with its exporters."""
    times, worked = VARIANTS[variant]
    pages = ["" for _ in times]
    for number, server in enumerate((BUSY, replace(BUSY, running=2, waiting=0))):
        host = f"{variant}{number}"
        labels = {"engine": "0", "model_name": "m", "instance": f"{host}:8000"}
        work = worked(steps(len(times), number))
        for index, done in enumerate(work):
            page = replace(server, labels=labels).page(done, index / (len(times) - 1))
            busy, idle = 40 + 10 * number + index, 1000 + 4.0 * done
            pages[index] += (
                f'{page}DCGM_FI_DEV_GPU_UTIL{{gpu="0",instance="{host}:9400"}} {busy}\n'
                f'node_cpu_seconds_total{{cpu="0",mode="idle",instance="{host}:9100"}} {idle}\n'
                f'sglang:spec_accept_length{{instance="{host}:8000",model_name="m",engine="0"}} {2 + index}\n'
            )
    return list(zip(times, pages, strict=True))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("agreement")
    load_recordings([(record(scrapes(name)), {"variant": name}) for name in VARIANTS], directory)
    with prometheus(directory) as url:
        yield url


def both(url: str, variant: str) -> tuple[Observation, Observation]:
    """Read from the scrapes, and from Prometheus."""
    recorded = Scrapes(scrapes(variant), variant).observe(None, DEFAULTS)
    source = PrometheusSource(url, f'variant="{variant}"', at=VARIANTS[variant][0][-1] / 1000)
    return recorded, source.observe(recorded.window_s, DEFAULTS)


def same(ours: Mapping[Group, Reading], theirs: Mapping[Group, Reading], name: str) -> int:
    """How many figures were compared."""
    theirs = {group.without(("variant",)): reading for group, reading in theirs.items()}
    assert ours.keys() == theirs.keys()
    compared = 0
    for group, own in ours.items():
        other = theirs[group]
        assert isinstance(own, Number) == isinstance(other, Number), (name, own, other)
        if isinstance(own, Number) and isinstance(other, Number):
            expected = pytest.approx((own.point, own.low, own.high), rel=0.01, abs=1e-9)
            assert (other.point, other.low, other.high) == expected, name
            compared += 1
    return compared


def test_every_signal_of_every_engine_agrees(loaded: str) -> None:
    compared = dict.fromkeys(SIGNALS, 0)
    for variant in VARIANTS:
        recorded, live = both(loaded, variant)
        own = recorded.evaluator.read_all(list(SIGNALS.values()))
        other = live.evaluator.read_all(list(SIGNALS.values()))
        for name in SIGNALS:
            compared[name] += same(own[name], other[name], f"{variant}: {name}")
    assert [name for name, times in compared.items() if not times] == []


def test_every_figure_of_a_fleet_agrees_and_comes_from_summed_histograms(loaded: str) -> None:
    signals = [SIGNALS[name] for name in FIGURES]
    for variant in VARIANTS:
        recorded, live = both(loaded, variant)
        own, other = (seen.evaluator.of_fleet().read_all(signals) for seen in (recorded, live))
        assert sum(same(own[name], other[name], f"{variant}: {name}") for name in FIGURES) == len(FIGURES)


class Counting(PrometheusSource):
    """Counts what it asks."""

    asked = 0

    def _asker(self, at: float) -> Ask:
        ask = super()._asker(at)

        def counting(query: str) -> list[Mapping[str, Any]]:
            self.asked += 1
            return ask(query)

        return counting


def fleet(engines: int) -> list[tuple[Recording, dict[str, str]]]:
    pages = record(Server(running=2, waiting=4, kv=0.02).scrapes(count=6))
    return [(pages, {"instance": f"host{number}:8000"}) for number in range(engines)]


def test_a_fleet_takes_no_more_questions_than_two_engines(tmp_path: Path) -> None:
    load_recordings(fleet(40), tmp_path)
    end = 1_700_000_000 + 20
    with prometheus(tmp_path) as url:
        two = Counting(url, 'instance=~"host[12]:8000"', at=end)
        assert len(diagnose(two, {"max_num_seqs": 2}, window=20).engines) == 2
        all_of_them = Counting(url, at=end)
        found = diagnose(all_of_them, {"max_num_seqs": 2}, window=20)
    assert sum(finding.id == "seq-cap" for finding in found.findings) == 40
    assert all_of_them.asked <= two.asked <= 20
    (whole,) = found.fleets
    assert whole.engines == 40
    rates = {figure.signal: figure for figure in whole.figures}
    assert rates["request_rate"].value == pytest.approx(40 * rates["request_rate"].highest[1])


def test_a_fleets_quantile_is_no_mean_of_quantiles() -> None:
    quick, slow = Server(histograms={"ttft": {0.03: 990}}), Server(histograms={"ttft": {30.0: 10}})
    pages = [
        replace(server, labels={"engine": "0", "model_name": "m", "instance": name}).scrapes()
        for name, server in (("a:1", quick), ("b:1", slow))
    ]
    merged = [(parts[0][0], "".join(text for _, text in parts)) for parts in zip(*pages, strict=True)]
    (whole,) = diagnose(Scrapes(merged), {}).fleets
    p95 = next(figure for figure in whole.figures if figure.signal == "ttft_p95")
    assert p95.value < 0.05
    assert p95.highest[0] == "b:1"
    assert p95.highest[1] > 20


def test_engines_whose_buckets_differ_are_bounded_by_their_own(tmp_path: Path) -> None:
    """Two versions of one model: a quantile in the last bucket of one is in the middle of the other's."""
    observed = {"generation_length": {9000.0: 10}}
    long = record(replace(BUSY, histograms=observed).scrapes())
    columns = long.series["vllm:request_generation_tokens_bucket"]
    short = {
        **long.series,
        "vllm:request_generation_tokens_bucket": [
            series
            for series in columns
            if series.labels["le"] == "+Inf" or float(series.labels["le"]) <= 2000
        ],
    }
    load_recordings(
        [(long, {"instance": "a:1"}), (replace(long, series=short), {"instance": "b:1"})], tmp_path
    )
    recorded = [observe_recording(r, "r", None, DEFAULTS) for r in (long, replace(long, series=short))]
    with prometheus(tmp_path) as url:
        live = PrometheusSource(url, at=long.times[-1] / 1000).observe(recorded[0].window_s, DEFAULTS)
        theirs = live.evaluator.read(SIGNALS["output_tokens_max"])
    for own, name in zip(recorded, ("a:1", "b:1"), strict=True):
        (ours,) = own.evaluator.read(SIGNALS["output_tokens_max"]).values()
        other = theirs[Group.of(instance=name, model_name="m", engine="0")]
        assert isinstance(ours, Number)
        assert isinstance(other, Number)
        assert (other.point, other.low, other.high) == pytest.approx((ours.point, ours.low, ours.high))
