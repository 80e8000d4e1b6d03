"""The HTML pages in a headless Chromium, without a network: no console message, every plot drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from in_a_browser import check_page, needs_a_browser
from made_runs import records

from loadgen.compare import Pair, compare_runs
from loadgen.measure.record import Records
from loadgen.output.comparison_page import comparison_page
from loadgen.output.run_page import run_page

SCRAPE = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.4\n"
SCRAPE += "vllm:num_preemptions_total 2\n"


def full_run() -> Records:
    """With everything that a page can show: classes, failures, the server's gauges and its share of TTFT."""
    run = records(failed=3)
    told = tuple(replace(r, server_queue=0.01, server_prefill=0.03) if r.ok else r for r in run.requests)
    return replace(run, requests=told, scrapes=((0, SCRAPE), (1000, SCRAPE)))


def pairs() -> list[Pair]:
    return [Pair(seed, records(seed), records(seed + 50, gap=14.0)) for seed in range(4)]


PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: run_page(full_run()),
    "run without the server's side": lambda: run_page(records()),
    "run in which all failed": lambda: run_page(records(requests=30, failed=30)),
    "comparison": lambda: comparison_page(
        compare_runs(pairs(), ["itl_p50", "ttft_p95", "throughput", "failed"])
    ),
}


@needs_a_browser
@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_every_plot_and_says_nothing_on_the_console(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name](), encoding="utf-8")
    check_page(page, at_least=3)
