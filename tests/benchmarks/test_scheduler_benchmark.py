"""The scheduler's benchmark: our side runs, counts what it says it counts, and reads the trace's stamps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engine.scheduler import Arrival, Ours, Pace, read_trace, replay, steady


def test_a_steady_step_is_measured() -> None:
    cost = steady(Ours(), running=3, steps=24)
    assert min(cost.values()) > 0


def test_a_replay_makes_every_token_once() -> None:
    trace = [Arrival(0.0, 100, 5), Arrival(0.1, 40, 1), Arrival(99.0, 7, 3)]
    found = replay(Ours(), trace, 1.0, 8, Pace())
    assert found["tokens"] == 100 + 4 + 40 + 7 + 2  # a prompt's step puts out the first token
    assert found["steps"] == 5 + 3  # the clock jumps to the last arrival
    assert min(found[part] for part in ("add", "schedule", "update")) > 0


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.5000000,396,109\n"
        "2023-11-16 18:15:46.2500000,374,0\n"
    )
    first, second = read_trace(path, None)
    assert (first.at, first.prompt, first.output) == (0.0, 374, 1)
    assert second.at == pytest.approx(4.25)
    assert read_trace(path, 1) == [first]
