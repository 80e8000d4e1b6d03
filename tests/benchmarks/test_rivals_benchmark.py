"""How arrivals are judged, and the mock that the tools are run against."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loadgen.mock_llm import Mock, mock
from benchmarks.peers.rival_tools import TOOLS, Load, Streams, VllmBench, stamped
from benchmarks.peers.rivals import judged, lateness
from loadgen.plan.arrivals import Constant, Gamma, Poisson


@pytest.fixture(scope="module")
def server() -> object:
    with mock("--gap-ms", "2") as found:
        yield found


@pytest.mark.parametrize(
    ("arrival", "kind", "burstiness"),
    [
        (Constant(200.0), "constant", 1.0),
        (Poisson(200.0), "poisson", 1.0),
        (Gamma(200.0, 0.25), "gamma", 0.25),
    ],
)
def test_what_was_asked_for_is_right_and_another_process_is_not(
    arrival: Constant | Poisson | Gamma, kind: str, burstiness: float
) -> None:
    times = arrival.times(np.random.default_rng(4), num_requests=4000)
    assert judged(times, kind, 200, burstiness).endswith("right")
    for other in {"constant", "poisson", "gamma"} - {kind}:
        assert judged(times, other, 200, 0.25).endswith("WRONG")


def test_a_wrong_rate_is_wrong_and_so_are_poisson_arrivals_in_bursts() -> None:
    times = Poisson(200.0).times(np.random.default_rng(4), num_requests=4000)
    assert judged(times, "poisson", 100, 1.0).endswith("WRONG")
    one_seed = np.repeat(times[::10], 10)  # ten workers that draw the same gaps
    assert judged(one_seed, "poisson", 200, 1.0).endswith("WRONG")


def test_lateness_is_counted_from_the_most_punctual_request() -> None:
    even = 5.0 + np.arange(1000) / 100
    assert lateness(even, 100) == pytest.approx(0.0, abs=1e-9)
    late = even.copy()
    late[500:520] += 0.03
    assert lateness(late, 100) == pytest.approx(0.03)


def test_the_mock_writes_its_clock_and_notes_arrivals(server: Mock) -> None:
    server.reset()
    streams = stamped(server.url, Streams(requests=3, tokens=5, spacing_ns=1_000_000))
    assert [len(stream) for stream in streams] == [5, 5, 5]
    for stream in streams:
        assert all(token.intended <= token.written <= token.at for token in stream)
    assert len(server.arrivals()) == 3


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_told_the_load(name: str, tmp_path: Path) -> None:
    tool = TOOLS[name](tmp_path, tmp_path)
    loads = Load(321, 77, concurrency=55), Load(321, 77, rate=88.0)
    told = (" ".join(tool.command("http://127.0.0.1:1", load, tmp_path)) for load in loads)
    closed, paced = (words.replace(str(tmp_path), "") for words in told)  # whose name has a number
    assert all(text in closed for text in ("321", "77", "55", "http://127.0.0.1:1"))
    assert "88" in paced
    assert "55" not in paced


def test_stamps_of_vllms_results_are_sums_of_its_gaps(tmp_path: Path) -> None:
    result = {"start_times": [10.0], "ttfts": [0.5], "itls": [[0.25]], "p99_ttft_ms": 500.0}
    result["generated_texts"] = [" 10490000000 10745000000"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    tool = VllmBench(tmp_path, tmp_path)
    assert tool.stamp_errors(tmp_path) == pytest.approx([0.01, 0.005])
    assert tool.p99_ttft(tmp_path) == 0.5
