"""``--replay``: a recorded trace cut into windows, one to search on and others to confirm on."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from llama_8b import CONFIG
from typer.testing import CliRunner

from loadgen.commands.options import Oversized
from loadgen.plan.traces import Trace, TraceError, TraceRow
from tuner.job.options import Replay
from tuner.runs.replay import MIN_REQUESTS, ReplayLoad, digest, read_replay
from vtune_cli import app

REPLAY = Replay(replay=Path("trace.csv"))


def trace(seconds: int = 200, quiet: range = range(0)) -> Trace:
    """Two requests a second, a third every tenth; every fourth second of ``quiet`` alone has one."""
    rows = []
    for second in range(seconds):
        rate = (2 if second % 10 else 3) if second not in quiet else int(second % 4 == 0)
        rows += [TraceRow(second + k / 4, 100 + second, 20, "short") for k in range(rate)]
    return Trace("t.csv", tuple(rows))


def load(recorded: Trace, replay: Replay = REPLAY, seconds: float = 20.0, seed: int = 3) -> ReplayLoad:
    return ReplayLoad.of(replay, recorded, seed, seconds, max_model_len=4096)


def times(schedule: Any) -> list[float]:
    return [r.intended for r in schedule.requests]


def test_a_run_is_a_window_of_the_trace_at_its_own_pace() -> None:
    replayed = load(trace(800), seconds=80.0)
    rungs = replayed.rungs()
    begin, length = replayed.searched.start, sum(len(part.requests) for part in rungs)
    recorded = [row.arrival - begin for row in trace(800).rows if begin <= row.arrival < begin + 80]
    first, second = (times(part) for part in rungs)
    assert [*first, *(at + recorded[len(first)] for at in second)] == pytest.approx(recorded)
    assert length == 168
    assert len(first) == round(0.4 * 168)
    assert [r.max_tokens for r in rungs[0].requests] == [20] * len(first)
    assert not rungs[1].warmup, "the second rung finds the server warm"


def test_it_is_compressed_only_when_asked() -> None:
    fast = load(trace(), replace(REPLAY, rate_scale=2.0))
    assert fast.windows[0].rate == pytest.approx(2 * load(trace()).windows[0].rate)
    gaps = {round(b - a, 6) for a, b in pairwise(times(fast.rungs()[0]))}
    assert gaps <= {0.125, 0.25, 0.375}


def test_trials_get_a_busy_window_and_a_confirmation_others() -> None:
    found = load(trace(quiet=range(60, 140)))
    assert len(found.windows) == 6, "four of ten windows hold fewer requests than can be measured"
    assert all(window.requests >= MIN_REQUESTS for window in found.windows)
    by_load = sorted(window.tokens for window in found.windows)
    assert found.searched.tokens == by_load[-2], "the busiest one is an accident"
    seeds = found.confirmation_seeds(5)
    assert seeds == [31_000, 31_001, 31_002, 31_003, 31_004]
    starts = [found.fresh[k].start for k in range(5)]
    assert len(set(starts)) == 5
    assert found.searched.start not in starts
    for seed, window in zip(seeds, found.fresh, strict=True):
        assert len(found.confirmation(seed).requests) == window.requests


def test_the_first_windows_of_a_confirmation_lie_all_over_the_trace() -> None:
    found = load(trace(2000))
    starts = sorted(window.start for window in found.fresh[:4])
    assert all(b - a == pytest.approx(2000 / 4, abs=20) for a, b in pairwise(starts))
    assert len({window.start for window in found.fresh}) == 99


def test_with_more_pairs_than_windows_the_prompts_differ() -> None:
    found = load(trace(), seconds=80.0)
    assert len(found.fresh) == 1
    first, second = (found.confirmation(seed) for seed in found.confirmation_seeds(2))
    assert times(first) == times(second)
    assert first.sha256 != second.sha256


def test_a_trace_shorter_than_two_runs_is_cut_in_the_middle() -> None:
    found = load(trace(30))
    assert found.run_seconds == pytest.approx(trace(30).duration / 2)
    assert len(found.windows) == 2


@pytest.mark.parametrize("recorded", [trace(8), Trace("one.csv", (TraceRow(0.0, 10, 10, "a"),) * 30)])
def test_a_trace_that_cannot_be_searched_on_and_confirmed_says_so(recorded: Trace) -> None:
    with pytest.raises(TraceError, match="a study needs 2"):
        load(recorded).rungs()


def test_requests_beyond_the_context_are_an_error_or_clipped() -> None:
    recorded = replace(trace(), rows=(*trace().rows[:-1], replace(trace().rows[-1], prompt_tokens=9000)))
    with pytest.raises(TraceError, match="exceed the context of 4096"):
        load(recorded)
    clipped = load(recorded, replace(REPLAY, oversized=Oversized.CLIP))
    assert max(row.prompt_tokens for row in clipped.trace.rows) == 4096 - 20


def test_options_survive_the_job_and_a_changed_file_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", trace())
    asked = Replay(replay=path, trace_window=(0.0, 100.0), rate_scale=2.0)
    data = json.loads(json.dumps({**(asked.to_json() or {}), "sha256": digest(path)}))
    assert Replay.from_json(data) == asked
    assert read_replay(data).duration < 100
    path.write_text(path.read_text() + "500.0,10,10\n")
    with pytest.raises(TraceError, match="changed since the study began"):
        read_replay(data)


def written(path: Path, recorded: Trace) -> Path:
    lines = [f"{row.arrival},{row.prompt_tokens},{row.output_tokens}" for row in recorded.rows]
    path.write_text("\n".join(["Timestamp,Request tokens,Response tokens", *lines]) + "\n")
    return path


def optimize(*words: str) -> Any:
    return CliRunner().invoke(app, ["optimize", *words])


def test_a_study_on_a_trace(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path, out = written(tmp_path / "t.csv", trace()), tmp_path / "out"
    result = optimize(
        *("--replay", str(path), "--target", "simulated:h100", "--model", str(tmp_path / "config.json")),
        *("--slo", "itl_es99<35ms", "--trials", "1", "--pairs", "3", "--fix", "all", "--run-time", "20s"),
        *("--vary", "max_num_batched_tokens=1024", "--rate-scale", "4", "--length-scale", "8"),
        *("--out", str(out)),
    )
    assert result.exit_code == 0, result.output
    report = json.loads((out / "report.json").read_text())
    assert "trace t.csv (rate x4, lengths x8): 420 requests" in report["load"]
    assert "2 windows of 20 s" in report["load"]
    assert "confirmation on others" in report["load"]
    assert report["profile"] == "the load was given"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate-scale", "2"], "--rate-scale needs --replay TRACE"),
        (["--replay", "T", "--rate", "3"], "Give --rate-scale"),
        (["--replay", "T", "--workload", "chat"], "Give one of the two"),
        (["--replay", "T", "--scale", "0.5"], "Give --length-scale"),
        (["--replay", "T", "--slo", "throughput"], "keeps the recorded rate: give bounds"),
        (["--replay", "T", "--trace-window", "0s,4s"], "Give a longer trace or --trace-window, or a --rate"),
        (["--replay", "T", "--run-time", "2s"], "Give a longer --run-time, or a --rate-scale above 1"),
        (["--replay", "none.csv"], "cannot read the trace"),
        (["--workload", "none.json"], "cannot be read"),
        (["--workload", "none"], "or a JSON file"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(words: list[str], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", trace())
    result = optimize(*(str(path) if word == "T" else word for word in words), "--out", str(tmp_path / "o"))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "o").exists()
