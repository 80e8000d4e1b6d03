"""The HTML pages in a headless Chromium, without a network: no console message, every plot drawn."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import records

from loadgen.compare import Pair, compare_runs
from loadgen.compare_html import html as comparison_page
from loadgen.html import html as run_page
from loadgen.record import Records

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
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


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_draws_every_plot_and_says_nothing_on_the_console(name: str, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    page = tmp_path / "page.html"
    page.write_text(PAGES[name](), encoding="utf-8")
    wanted = set(re.findall(r'<div id="(plot\d+)"', page.read_text()))
    assert len(wanted) >= 3
    browser = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--enable-logging=stderr", "--virtual-time-budget=10000",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    said = [line for line in browser.stderr.splitlines() if "CONSOLE" in line]
    assert said == []
    places = [*re.finditer(r'id="(plot\d+)"', browser.stdout), None]
    drawn = {
        place[1]
        for place, following in pairwise(places)
        if place
        and 'class="main-svg"' in browser.stdout[place.start() : following.start() if following else None]
    }
    assert drawn == wanted
