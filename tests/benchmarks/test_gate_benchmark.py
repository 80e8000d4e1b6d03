"""The resampling of the gate's benchmark, on runs that are made up."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loadgen import gate
from loadgen.compare import Pair
from loadgen.measure.record import ClientStats, Failure, Records, RequestRecord
from loadgen.measure.stats import Summary

MS = 1_000_000


def run(slow: float, *, failed: int = 0) -> Records:
    """60 requests one after the other: TTFT 50 ms, 11 tokens every 10 ms, all times ``slow``."""
    step = round(10 * MS * slow)
    requests = tuple(
        RequestRecord(
            index=i,
            cls="random",
            intended=i * 200 * MS,
            sent=i * 200 * MS,
            end=i * 200 * MS + 15 * step,
            chunk_at=() if i < failed else tuple(i * 200 * MS + (5 + k) * step for k in range(11)),
            chunk_tokens=() if i < failed else (1.0,) * 11,
            failure=Failure.REFUSED if i < failed else None,
            finish_reason=None if i < failed else "length",
            max_tokens=11,
        )
        for i in range(60)
    )
    return Records(
        schedule_sha256="5c4ed01e" * 8,
        schedule="made up",
        mode="closed",
        concurrency=1,
        planned=60,
        requests=requests,
        window=(0.0, 12.0),
        client=ClientStats("asyncio", 1, 0.1, 10.0, 100, 0.0, 0.0, 0.0),
        environment={"cpus": 2},
        start_unix_ms=0,
        verdict="ok",
    )


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """24 pairs whose runs differ by 2 %."""
    noise = np.exp(np.random.default_rng(3).normal(0, 0.02, (24, 2)))
    return [Pair(seed, run(a), run(b)) for seed, (a, b) in enumerate(noise)]


def test_prolonging_stretches_every_latency_and_moves_no_request() -> None:
    before, after = run(1.0), gate.prolonged(run(1.0), 1.1)
    for name in ("ttft_p50", "tpot_p50", "itl_es99", "e2e_p50"):
        assert Summary(after).value(name) == pytest.approx(1.1 * Summary(before).value(name), rel=1e-6)
    assert [r.intended for r in after.requests] == [r.intended for r in before.requests]
    assert Summary(after).value("throughput") == Summary(before).value("throughput")


def test_samples_are_of_different_pairs_with_both_sides_first_equally_often(pairs: list[Pair]) -> None:
    kept = {pair.seed: pair for pair in pairs}
    samples = list(gate.draws(pairs, kept, 100, seed=1))
    assert all(len({pair.seed for pair in sample}) == gate.PAIRS for sample in samples)
    swapped = sum(pair.a is kept[pair.seed].b for sample in samples for pair in sample)
    assert 0.4 < swapped / 800 < 0.6
    assert samples == list(gate.draws(pairs, kept, 100, seed=1))


def test_an_injected_slowdown_is_found_and_none_is_not(pairs: list[Pair]) -> None:
    slower = {p.seed: Pair(p.seed, gate.prolonged(p.a, 1.1), gate.prolonged(p.b, 1.1)) for p in pairs}
    kept = {pair.seed: pair for pair in pairs}
    whole, _ = gate.verdicts(gate.draws(pairs, kept, 40, seed=1), ("ttft_p50", "tpot_p50"))
    assert whole["regress"] <= 2
    whole, each = gate.verdicts(gate.draws(pairs, slower, 40, seed=1), ("ttft_p50", "tpot_p50"))
    assert whole["regress"] == 40
    assert each["ttft_p50"] == Counter(regress=40)


def test_runs_are_kept_and_only_missing_ones_are_made(pairs: list[Pair], tmp_path: Path) -> None:
    for pair in pairs[:3]:
        pair.a.save(gate.path_of(tmp_path, pair.seed, "a"))
        pair.b.save(gate.path_of(tmp_path, pair.seed, "b"))
    pairs[3].a.save(gate.path_of(tmp_path, 3, "a"))
    gate.collect(tmp_path, 6, 1.0, one=True)  # nothing is missing: no server is started
    assert gate.load_pairs(tmp_path) == pairs[:3]


def test_a_spoilt_run_is_made_again() -> None:
    runs = [replace(run(1.0), verdict="client_limited", reasons=("late",)), run(1.0)]

    class Server:
        def run(self, load: object) -> Records:
            return runs.pop(0)

    assert gate.believed(Server(), None).verdict == "ok"  # type: ignore[arg-type]
    assert not runs


def test_the_benchmark_runs_as_a_module() -> None:
    assert importlib.util.find_spec("benchmarks.loadgen.gate") is not None
    assert "engine" not in {name.partition(".")[0] for name in vars(gate) if name in sys.modules}
