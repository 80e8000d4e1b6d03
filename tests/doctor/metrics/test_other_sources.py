"""Rules that need more than one server's metrics: exporters of the host, a log, a baseline, a benchmark."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_prometheus import load_recording, needs_prometheus, prometheus
from synthetic_server import Server

from doctor.diagnosis.diagnose import Diagnosis, diagnose
from doctor.diagnosis.judged_objectives import DEFAULTS
from doctor.metrics.benchmark import BenchmarkResult, WithBenchmark
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import PrometheusSource, Scrapes
from servers.errors import SourceError
from servers.metrics.exposition import record
from servers.reading import Number
from servers.server_log import parse_log

BASE = Server()
SLOW = {"itl": {0.35: 1000}, "queue_time": {8.0: 10}}


def beside(
    server: Server, gpus: list[float], engines: int = 1, cpu_idle: float = 0.5
) -> list[tuple[int, str]]:
    """``server`` (as many times as there are engines) on a host with exporters."""
    fleets = [
        replace(server, labels={**server.labels, "instance": f"h:{8000 + n}"}).scrapes()
        for n in range(engines)
    ]
    pages = []
    for number, parts in enumerate(zip(*fleets, strict=True)):
        host = "".join(
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",instance="h:9400"}} {busy}\n' for gpu, busy in enumerate(gpus)
        )
        idle = 1000 + number * 4 * cpu_idle
        host += f'node_cpu_seconds_total{{cpu="0",mode="idle",instance="h:9100"}} {idle}\n'
        host += f'node_cpu_seconds_total{{cpu="0",mode="user",instance="h:9100"}} {5000 + number}\n'
        pages.append((parts[0][0], "".join(text for _, text in parts) + host))
    return pages


def ids(found: Diagnosis) -> set[str]:
    return {finding.id for finding in found.findings}


def unclear(found: Diagnosis) -> dict[str, str]:
    return {item.id: "; ".join(missing.why for missing in item.missing) for item in found.cannot_tell}


def test_a_busy_server_with_idle_gpus_is_bound_by_its_host() -> None:
    found = diagnose(Scrapes(beside(BASE, [30.0, 40.0], cpu_idle=0.1)), {})
    assert ids(found) == {"host-bound"}
    evidence = {e.signal: e.value for e in found.findings[0].evidence}
    assert (evidence["gpu_utilization"], evidence["cpu_utilization"]) == pytest.approx((0.35, 0.9), abs=0.01)
    assert diagnose(Scrapes(beside(BASE, [97.0, 99.0])), {}).findings == ()


def test_gpus_at_their_limit_are_told() -> None:
    queued = replace(BASE, running=64, waiting=9, histograms=SLOW)
    assert "hardware-limit" in ids(diagnose(Scrapes(beside(queued, [99.0])), {}))
    assert "hardware-limit" not in ids(diagnose(Scrapes(beside(queued, [70.0])), {}))


def test_two_engines_on_one_gpu_are_told() -> None:
    assert "colocated" in ids(diagnose(Scrapes(beside(BASE, [90.0], engines=2)), {}))
    assert "colocated" not in ids(diagnose(Scrapes(beside(BASE, [90.0, 90.0], engines=2)), {}))


def test_without_exporters_the_rules_cannot_tell_and_health_stays_health() -> None:
    found = diagnose(Scrapes(BASE.scrapes()), {})
    assert found.healthy
    assert unclear(found)["host-bound"] == "no DCGM exporter beside the server"
    assert "colocated" not in unclear(found)


@needs_prometheus
def test_prometheus_gives_the_same_figures_of_the_host(tmp_path: Path) -> None:
    pages = beside(BASE, [30.0, 40.0], engines=2, cpu_idle=0.1)
    load_recording(record(pages), tmp_path, {})
    recorded = Scrapes(pages).observe(None, DEFAULTS)
    with prometheus(tmp_path) as url:
        source = PrometheusSource(url, 'engine="0"', at=pages[-1][0] / 1000)
        live = source.observe(recorded.window_s, DEFAULTS)
        for name in ("gpu_utilization", "gpus_on_host", "cpu_utilization", "engines_on_host"):
            ours, theirs = recorded.evaluator.read(SIGNALS[name]), live.evaluator.read(SIGNALS[name])
            assert ours.keys() == theirs.keys()
            for group, number in ours.items():
                other = theirs[group]
                assert isinstance(number, Number)
                assert isinstance(other, Number)
                assert other.point == pytest.approx(number.point, rel=0.01), name


def slow_then_quick(slow: float) -> list[tuple[int, str]]:
    """A fresh server whose first requests take ``slow`` seconds to their first token."""
    first = replace(BASE, histograms={"ttft": {slow: 10}})
    pages = first.scrapes(count=9)
    count, total, text = 90, slow * 90, pages[-1][1]
    name = "vllm:time_to_first_token_seconds"
    for number in range(1, 9):
        page = text
        for part, old, step in (("count", count, 10), ("sum", total, 1.0)):
            start = page.index(f"{name}_{part}")
            line = page[start : page.index("\n", start)]
            page = page.replace(line, line.rsplit(" ", 1)[0] + f" {old + step * number}")
        pages.append((pages[-1][0] + 4000, page))
    return pages


def test_slow_first_requests_of_a_fresh_server_are_told() -> None:
    assert "cold-requests" in ids(diagnose(Scrapes(slow_then_quick(2.0)), {}))
    assert "cold-requests" not in ids(diagnose(Scrapes(slow_then_quick(0.12)), {}))


LOG = """INFO 11-29 12:07:24 [default_loader.py:501] Loading weights took 95.20 seconds
INFO 11-29 12:07:40 [monitor.py:34] torch.compile takes 48.00 s in total
INFO 11-29 12:07:40 [core.py:402] init engine (profile, create kv cache, warmup model) took 80.50 s
"""


def test_a_log_tells_a_slow_start() -> None:
    found = diagnose(Scrapes(BASE.scrapes()), {}, log=parse_log(LOG))
    assert ids(found) == {"slow-start"}
    texts = [item.text for item in found.findings[0].prescriptions]
    assert any("VLLM_CACHE_ROOT" in text for text in texts)
    quick = parse_log(LOG.replace("95.20", "5.20"))
    assert ids(diagnose(Scrapes(BASE.scrapes()), {}, log=quick)) == set()
    assert "(--log FILE)" in unclear(diagnose(Scrapes(BASE.scrapes()), {}))["slow-start"]


def against(now: Server, before: Server, flags: Mapping[str, Any], old: Mapping[str, Any]) -> Diagnosis:
    return diagnose(Scrapes(now.scrapes()), flags, baseline=Scrapes(before.scrapes()), baseline_flags=old)


def test_a_shift_against_the_baseline_needs_other_traffic() -> None:
    longer = {"ttft": {0.6: 10}, "prompt_length": {900.0: 10}, "prefill_length": {900.0: 10}}
    assert "baseline-shift" in ids(against(replace(BASE, histograms=longer), BASE, {}, {}))
    same = replace(BASE, histograms={"ttft": {0.6: 10}})
    assert "baseline-shift" not in ids(against(same, BASE, {}, {}))
    assert "baseline-shift" not in ids(against(BASE, BASE, {}, {}))
    assert "--baseline" in unclear(diagnose(Scrapes(BASE.scrapes()), {}))["baseline-shift"]


def test_another_model_under_the_same_flags_is_told() -> None:
    other = replace(BASE, labels={"engine": "0", "model_name": "other"})
    flags = {"max_num_batched_tokens": 2048, "max_num_seqs": 64}
    assert "model-changed" in ids(against(other, BASE, flags, flags))
    assert "model-changed" not in ids(against(BASE, BASE, flags, flags))
    half = replace(BASE, config={"num_gpu_blocks": "2049"})
    assert "model-changed" in ids(against(half, BASE, flags, flags))
    assert "model-changed" not in ids(
        against(other, BASE, flags, {"max_num_batched_tokens": 4096, "max_num_seqs": 32})
    )


def test_a_spike_that_ignores_the_budget_is_told() -> None:
    spiky = replace(BASE, histograms={"itl": {0.03: 970, 1.5: 30}})
    small, large = {"max_num_batched_tokens": 1024}, {"max_num_batched_tokens": 4096}
    assert "itl-spikes-outside-graphs" in ids(against(spiky, spiky, small, large))
    lower = replace(BASE, histograms={"itl": {0.03: 970, 0.25: 30}})
    assert "itl-spikes-outside-graphs" not in ids(against(lower, spiky, small, large))


V1 = (
    "INFO 11-29 14:05:{s:02d} [loggers.py:123] Engine 000: Avg prompt throughput: 20.0 tokens/s, "
    "Avg generation throughput: 10.0 tokens/s, Running: 3 reqs, Waiting: 5 reqs, "
    "GPU KV cache usage: 12.5%, Prefix cache hit rate: 40.0%\n"
    "INFO 11-29 14:05:{s:02d} [metrics.py:96] SpecDecoding metrics: Mean acceptance length: 1.90, "
    "Accepted throughput: 3.00 tokens/s, Drafted throughput: 10.00 tokens/s, Accepted: 30 tokens, "
    "Drafted: 100 tokens, Per-position acceptance rate: 0.300, Avg Draft acceptance rate: 30.0%\n"
)
V0 = (
    "WARNING 11-29 14:05:{s:02d} scheduler.py:1754] Sequence group 9 is preempted by "
    "PreemptionMode.RECOMPUTE mode because there is not enough KV cache space. This can affect the "
    "end-to-end performance. total_num_cumulative_preemption={s}\n"
    "INFO 11-29 14:05:{s:02d} metrics.py:455] Avg prompt throughput: 20.0 tokens/s, Avg generation "
    "throughput: 10.0 tokens/s, Running: 3 reqs, Swapped: 0 reqs, Pending: 5 reqs, GPU KV cache usage: "
    "12.5%, CPU KV cache usage: 0.0%.\n"
    "INFO 11-29 14:05:{s:02d} metrics.py:471] Prefix cache hit rate: GPU: 40.00%, CPU: 0.00%\n"
    "INFO 11-29 14:05:{s:02d} metrics.py:477] Speculative metrics: Draft acceptance rate: 0.300, System "
    "efficiency: 0.4, Number of speculative tokens: 4, Number of accepted tokens: {s}, Number of draft "
    "tokens: {s}0, Number of emitted tokens: 9.\n"
)


def of_log(template: str) -> dict[str, float]:
    log = "".join(template.format(s=second) for second in range(1, 52, 10))
    evaluator = Scrapes(parse_log(log).scrapes, "log").observe(None, DEFAULTS).evaluator
    values = {}
    for name, signal in SIGNALS.items():
        (reading,) = evaluator.read(signal).values()
        if isinstance(reading, Number):
            values[name] = reading.point
    return values


TROUBLED = (
    "(APIServer pid=9) INFO 11-29 14:05:{s:02d} [loggers.py:335] Engine 000: Avg prompt throughput: 20.0 "
    "tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 3 reqs, Waiting: 5 reqs, Deferred: 2 reqs, "
    "KV fetch: 1 waiting to start, 1 in progress, 0 completed waiting, Preemptions: 7, "
    "GPU KV cache usage: 97.5%, Prefix cache hit rate: 40.0%, External prefix cache hit rate: 80.0%, "
    "MM cache hit rate: 90.0%\n"
)
"""As vLLM 0.32 writes it when much goes on."""


def test_what_a_line_of_a_troubled_server_adds_is_read() -> None:
    values = of_log(TROUBLED)
    names = "running_mean", "waiting_mean", "deferred_mean", "kv_mean"
    assert [values[name] for name in names] == [3, 3, 2, 0.975]
    assert values["preemptions"] == pytest.approx(35, rel=0.01)
    assert values["prefix_hit_rate"] == pytest.approx(0.4)


def test_a_log_that_never_says_how_often_it_preempted_does_not_say_never() -> None:
    assert "preemptions" not in of_log(V1)
    never = TROUBLED.replace("Preemptions: 7, ", "")
    once = never.format(s=1) + TROUBLED.format(s=11) + never.format(s=21) + never.format(s=31)
    evaluator = Scrapes(parse_log(once).scrapes, "log").observe(None, DEFAULTS).evaluator
    (reading,) = evaluator.read(SIGNALS["preemptions"]).values()
    assert isinstance(reading, Number)
    assert reading.point == pytest.approx(7, rel=0.05)


def test_a_log_goes_on_over_new_year() -> None:
    days = ("12-31 23:59:41", "12-31 23:59:51", "01-01 00:00:01", "01-01 00:00:11")
    log = "".join(V1.format(s=1).replace("11-29 14:05:01", day) for day in days)
    times = [unix_ms for unix_ms, _ in parse_log(log).scrapes]
    assert [later - first for first, later in itertools.pairwise(times)] == [10_000] * 3


@pytest.mark.parametrize(
    ("line", "tokens", "length"),
    [
        (
            "GPU KV cache size: 93,184 tokens, Maximum concurrency for 4,096 tokens per request: 22.75x",
            93184,
            4096,
        ),
        ("GPU KV cache size: 93,184 tokens", 93184, None),
        ("# GPU blocks: 7451, # CPU blocks: 2048", 7451 * 16, None),
        ("# cuda blocks: 27896, # CPU blocks: 4681", 27896 * 16, None),
        ("Maximum concurrency for 131072 tokens per request: 29.10x", None, 131072),
    ],
)
def test_the_pool_of_every_version_is_read(line: str, tokens: int | None, length: int | None) -> None:
    facts = parse_log(f"INFO 11-29 12:07:40 [kv_cache_utils.py:2327] {line}\n")
    assert (facts.kv_cache_tokens, facts.flags.get("max_model_len")) == (tokens, length)


def test_older_warnings_of_preemption_are_counted() -> None:
    older = V0.replace("total_num_cumulative_preemption=", "total_cumulative_preemption_cnt=")
    assert of_log(older)["preemptions"] == pytest.approx(50, rel=0.01)


def test_the_lines_of_a_new_log_are_signals() -> None:
    values = of_log(V1)
    assert (values["running_mean"], values["waiting_mean"], values["kv_mean"]) == (3, 5, 0.125)
    assert values["prefix_hit_rate"] == pytest.approx(0.4)
    assert values["acceptance"] == pytest.approx(0.3)
    assert values["generation_rate"] == pytest.approx(10.0, rel=0.01)


def test_the_lines_of_an_old_log_are_signals() -> None:
    values = of_log(V0)
    assert (values["running_mean"], values["waiting_mean"], values["kv_mean"]) == (3, 5, 0.125)
    assert values["preemptions"] == pytest.approx(50, rel=0.01)
    assert values["acceptance"] == pytest.approx(0.1)
    assert values["prefix_hit_rate"] == pytest.approx(0.4)


RESULT: dict[str, Any] = {
    "model_id": "m",
    "num_prompts": 500,
    "completed": 500,
    "duration": 100.0,
    "request_rate": 5.2,
    "total_input_tokens": 100_000,
    "total_output_tokens": 50_000,
    "output_throughput": 500.0,
    "mean_ttft_ms": 150.0,
    "median_ttft_ms": 120.0,
    "p99_ttft_ms": 400.0,
    "median_itl_ms": 20.0,
}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, set()),
        ({"request_rate": "inf"}, set()),
        ({"completed": 40, "num_prompts": 40, "request_rate": 0.4}, {"invalid-measurement"}),
        ({"completed": 480}, {"invalid-measurement"}),
        ({"request_rate": 8.0}, {"invalid-measurement"}),
        ({"duration": 5.0, "request_rate": "inf"}, {"invalid-measurement"}),
    ],
)
def test_a_benchmark_is_judged_by_whether_it_can_be_relied_on(
    changes: dict[str, Any], found: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**RESULT, **changes}))
    assert ids(diagnose(BenchmarkResult(path))) == found


@pytest.mark.parametrize(("hits", "found"), [(0, set()), (950, {"invalid-measurement"})])
def test_a_benchmark_whose_prompts_were_cached_is_told_by_the_metrics_beside_it(
    hits: float, found: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(RESULT))
    server = Server(counters={"prefix_queries": 1000, "prefix_hits": hits})
    diagnosis = diagnose(WithBenchmark(Scrapes(server.scrapes()), BenchmarkResult(path)))
    assert ids(diagnosis) == found
    titles = [finding.title for finding in diagnosis.findings]
    assert titles == ["The benchmark found its prompts in the prefix cache"] * bool(hits)


def stated(path: Path, *documents: Mapping[str, Any]) -> Diagnosis:
    path.write_text("\n".join(map(json.dumps, documents)))
    return diagnose(BenchmarkResult(path))


def test_repeats_of_a_benchmark_are_judged_together(tmp_path: Path) -> None:
    half = {**RESULT, "completed": 60, "num_prompts": 60, "request_rate": 0.6}
    fine = stated(tmp_path / "twice.json", half, half)
    assert ids(fine) == set(), "120 requests together"
    assert "2 results of one load: judged by their means" in fine.notes
    slow = stated(tmp_path / "loads.json", RESULT, {**RESULT, "request_rate": 8.0})
    assert ids(slow) == {"invalid-measurement"}
    assert any("only the last of several loads is judged (8 req/s" in note for note in slow.notes)


def test_other_tools_results_are_judged_as_far_as_they_go(tmp_path: Path) -> None:
    summary = {
        "results_ttft_s_quantiles_p99": 0.5,
        "results_ttft_s_mean": 0.18,
        "results_num_requests_started": 480,
        "results_number_errors": 0,
    }
    unknown = stated(tmp_path / "llmperf.json", summary)
    assert ids(unknown) == set()
    assert any("does not state its duration" in note for note in unknown.notes)
    assert ids(stated(tmp_path / "errors.json", {**summary, "results_number_errors": 9})) == {
        "invalid-measurement"
    }


def test_another_file_is_no_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    for text in ("{}", "[1]", "{", json.dumps({**RESULT, "duration": 0})):
        path.write_text(text)
        with pytest.raises(SourceError, match=r"--bench .*result\.json: "):
            diagnose(BenchmarkResult(path))


def test_a_cpu_that_hundreds_of_sequences_use_up_is_the_cause_of_idle_gpus() -> None:
    wide = replace(BASE, running=300)
    found = diagnose(Scrapes(beside(wide, [40.0], cpu_idle=0.05)), {"max_num_seqs": 512})
    assert [(f.id, f.suppressed_by) for f in found.findings] == [
        ("scheduler-bound", None),
        ("host-bound", "scheduler-bound"),
    ]
    assert found.findings[0].prescriptions[0].changes == {
        "max_num_seqs": 144
    }  # a size that a graph is captured for
    rested = diagnose(Scrapes(beside(wide, [40.0], cpu_idle=0.6)), {"max_num_seqs": 512})
    assert ids(rested) == {"host-bound"}
