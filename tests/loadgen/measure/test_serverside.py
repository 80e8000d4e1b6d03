"""The server's side of a run: its gauges over time, and its share of each TTFT."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_runs import records
from recorded_exchange import event, exchange, planned, text

from loadgen.measure.record import Failure, Records
from loadgen.measure.serverside import timeline
from loadgen.measure.stats import Summary
from loadgen.output.report import part_rows, run_markdown
from loadgen.output.run_page import run_page
from loadgen.wire.completion import parse_exchange

SCRAPE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_running{{engine="1"}} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:kv_cache_usage_perc{{engine="1"}} {kv}
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0"}} {preemptions}
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} 3
"""


def scraped(*figures: tuple[float, float, float]) -> Records:
    """A run with a scrape a second of (running, KV, preemptions so far)."""
    taken = [
        (1000 * second, SCRAPE.format(running=running, kv=kv, preemptions=preemptions))
        for second, (running, kv, preemptions) in enumerate(figures)
    ]
    return replace(records(), scrapes=tuple(taken))


def test_engines_add_up_and_of_kv_usage_the_fullest_counts() -> None:
    told = timeline(scraped((3, 0.25, 7), (4, 0.75, 9)))
    assert told is not None
    assert told.at == (0.0, 1.0)
    assert told.running == (4.0, 5.0)
    assert told.waiting == (2.0, 2.0)
    assert told.kv_usage == (0.5, 0.75)
    assert told.preemptions == (0.0, 2.0)


def test_preemptions_across_a_restart_are_those_since() -> None:
    told = timeline(scraped((1, 0, 50), (1, 0, 3), (1, 0, 4)))
    assert told is not None
    assert told.preemptions == (0.0, 3.0, 1.0)


def test_names_of_other_servers_and_versions_are_known() -> None:
    page = "sglang:num_running_reqs 5\nsglang:token_usage 0.2\nsglang:num_retracted_requests_total 7\n"
    told = timeline(replace(records(), scrapes=((0, page),)))
    assert told is not None
    assert (told.running, told.kv_usage, told.preemptions) == ((5.0,), (0.2,), (0.0,))
    assert not told.known("waiting")
    old = timeline(replace(records(), scrapes=((0, "vllm:gpu_cache_usage_perc 0.9\n"),)))
    assert old is not None
    assert old.kv_usage == (0.9,)


@pytest.mark.parametrize("text", ["", "<html>", "vllm:num_requests_running{ 3", "up 1\n"])
def test_what_is_no_exposition_is_no_timeline(text: str) -> None:
    assert timeline(replace(records(), scrapes=((0, text),))) is None


def test_a_gauge_that_a_scrape_lacks_is_not_zero() -> None:
    told = timeline(replace(records(), scrapes=((0, "vllm:num_requests_running 3\n"),)))
    assert told is not None
    assert told.known("running")
    assert not told.known("kv_usage")
    assert math.isnan(told.waiting[0])


def told_run() -> Records:
    """Requests whose TTFT of 50 ms is 10 ms of queue, 30 of prefill, and 10 elsewhere."""
    run = records()
    return replace(
        run,
        requests=tuple(replace(r, server_queue=0.010, server_prefill=0.030) for r in run.requests),
    )


def test_the_parts_of_a_ttft_add_up_to_it() -> None:
    summary = Summary(told_run())
    parts = [summary.value(f"{part}_mean") for part in ("lateness", "queue", "prefill", "elsewhere")]
    assert parts[:3] == [0.0, pytest.approx(0.010), pytest.approx(0.030)]
    assert sum(parts) == pytest.approx(summary.value("ttft_mean"))
    rows = list(part_rows(summary))
    assert [row[1] for row in rows if row[0] == "all"] == [
        "send lateness", "in the queue", "in prefill", "elsewhere",
    ]  # fmt: skip
    assert "| all | in prefill | 6" in run_markdown(told_run())


def test_without_a_word_from_the_server_there_is_no_table_of_parts() -> None:
    assert list(part_rows(Summary(records()))) == []
    assert "in prefill" not in run_markdown(records())
    assert math.isnan(Summary(records()).value("queue_p50"))


def test_failed_requests_have_no_infinite_queue() -> None:
    run = told_run()
    first = replace(run.requests[0], failure=Failure.REFUSED, server_queue=None, server_prefill=None)
    summary = Summary(replace(run, requests=(first, *run.requests[1:])))
    assert summary.count("queue_p50") == 59
    assert summary.value("queue_p50") == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"queue_time_ms": 12.5, "time_to_first_token_ms": 80}, (0.0125, 0.08)),
        ({"queue_time_ms": None, "time_to_first_token_ms": -1}, (None, None)),
        ({"queue_time_ms": "12", "time_to_first_token_ms": True}, (None, None)),
        ([], (None, None)),
    ],
)
def test_times_that_the_server_sends_with_the_usage_are_read(
    metrics: object, expected: tuple[float | None, float | None]
) -> None:
    last = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}, "metrics": metrics})
    raw = exchange([(1, text(" a", "length")), (2, last)])
    record = parse_exchange(raw, planned(1), 0)
    assert record.failure is None
    assert (record.server_queue, record.server_prefill) == expected


def test_the_page_shows_the_servers_side_where_there_is_one() -> None:
    run = replace(told_run(), scrapes=scraped((3, 0.2, 1), (5, 0.4, 2)).scrapes)
    page = run_page(run)
    for title in ("Requests in the server", "KV cache in use", "Preemptions between", "Where the mean TTFT"):
        assert title in page
        assert title not in run_page(records())
    assert "<h2>Environment</h2>" in page


def test_records_with_the_servers_times_are_saved_and_loaded(tmp_path: Path) -> None:
    told_run().save(tmp_path / "x.json")
    assert Records.load(tmp_path / "x.json").requests == told_run().requests
