"""Comparisons: order, refusal, verdicts and what becomes of servers that fail, on made-up runs."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from made_runs import records

from loadgen.compare import Comparison, Incomparable, Pair, compare, compare_runs
from loadgen.measure.estimator import TOTALS
from loadgen.measure.record import Records
from loadgen.measure.stats import FigureError
from loadgen.plan.arrivals import ClosedLoop
from loadgen.plan.workload import Schedule, preset
from loadgen.target import OpenTarget, RunFailed, StartFailed, Target

METRICS = ("itl_p50", "ttft_p95", "throughput", "failed")
MS = 1_000_000


def schedule_for(seed: int) -> Schedule:
    workload = preset("random", max_model_len=512, vocab_size=1000)
    return workload.schedule(seed=seed, arrival=ClosedLoop(4), num_requests=4)


def pairs(count: int = 8, slower: float = 1.0, **b: Any) -> list[Pair]:
    return [Pair(s, records(2 * s), records(2 * s + 1, gap=10 * slower, **b)) for s in range(count)]


class Bench(Target):
    """A target without servers. ``journal`` tells what was opened, run and closed."""

    name = "made up"

    def __init__(self, run: Callable[[Mapping[str, Any], int], Records] | None = None) -> None:
        self.journal: list[str] = []
        self.up: set[str] = set()
        self.room = 2
        self._run = run or (lambda config, seed: records(seed, gap=config.get("gap", 10)))

    @contextmanager
    def open(self, config: Mapping[str, Any]) -> Iterator[OpenTarget]:
        name = config["name"]
        if len(self.up) >= self.room:
            raise StartFailed("out_of_memory", "no room")
        if config.get("broken"):
            raise StartFailed("bad_flag", "no such flag")
        self.journal.append(f"open {name}")
        self.up.add(name)
        try:
            yield _Open(self, config)
        finally:
            self.up.remove(name)
            self.journal.append(f"close {name}")

    def launch_command(self, config: Mapping[str, Any]) -> str:
        return str(config)


class _Open(OpenTarget):
    def __init__(self, bench: Bench, config: Mapping[str, Any]) -> None:
        self._bench, self._config = bench, config

    def run(
        self,
        schedule: Schedule,
        progress: Callable[..., None] | None = None,
        stop: threading.Event | None = None,
        *,
        timeout: float = 600.0,
        drain: float | None = None,
    ) -> Records:
        self._bench.journal.append(f"{self._config['name']}{schedule.seed}")
        made = self._bench._run(self._config, schedule.seed or 0)
        return replace(made, schedule_sha256=schedule.sha256)

    def scrape(self) -> str:
        return ""

    def log_tail(self, lines: int = 30) -> str:
        return ""


A, B = {"name": "A"}, {"name": "B"}


def test_pairs_are_interleaved_with_both_servers_up() -> None:
    bench, seen = Bench(), []
    result = compare(
        bench, A, B, schedule_for, seeds=[1, 2, 3], metrics=METRICS, progress=lambda *now: seen.append(now)
    )
    runs = ["A1", "B1", "B2", "A2", "A3", "B3"]
    assert bench.journal == ["open A", "open B", *runs, "close A", "close B"]
    assert seen[0] == (0, 6, "pair 1, A")
    assert seen[-1] == (5, 6, "pair 3, B")
    assert result.together
    assert [pair.seed for pair in result.pairs] == [1, 2, 3]
    assert [pair.a.schedule_sha256 for pair in result.pairs] == [schedule_for(s).sha256 for s in (1, 2, 3)]


@pytest.mark.parametrize("how", ["exclusive target", "asked", "no room for both"])
def test_servers_are_restarted_in_turn_where_two_do_not_fit(how: str) -> None:
    bench = Bench()
    bench.exclusive = how == "exclusive target"
    bench.room = 1 if how == "no room for both" else 2
    result = compare(
        bench,
        A,
        B,
        schedule_for,
        seeds=[1, 2, 3],
        metrics=METRICS,
        together=False if how == "asked" else None,
    )
    expected = "open A|A1|close A|open B|B1|B2|close B|open A|A2|A3|close A|open B|B3|close B"
    tried = ["open A", "close A"] if how == "no room for both" else []
    assert bench.journal == [*tried, *expected.split("|")]
    assert not result.together
    assert len(result.notes) == len(tried) / 2


def test_a_config_that_does_not_start_is_named() -> None:
    bench = Bench()
    with pytest.raises(StartFailed) as caught:
        compare(bench, A, B | {"broken": True}, schedule_for, seeds=[1], metrics=METRICS)
    assert caught.value.side == "b"
    assert not bench.up


def test_a_server_that_dies_in_a_run_is_named_and_the_other_one_closed() -> None:
    def run(config: Mapping[str, Any], seed: int) -> Records:
        if config["name"] == "A" and seed == 2:
            raise RunFailed("killed", "gone")
        return records(seed)

    bench = Bench(run)
    with pytest.raises(RunFailed) as caught:
        compare(bench, A, B, schedule_for, seeds=[1, 2], metrics=METRICS)
    assert caught.value.side == "a"
    assert not bench.up


def test_stopping_keeps_whole_pairs() -> None:
    stop = threading.Event()

    def run(config: Mapping[str, Any], seed: int) -> Records:
        if (config["name"], seed) == ("B", 3):
            stop.set()
        return records(seed)

    result = compare(Bench(run), A, B, schedule_for, seeds=range(1, 9), metrics=METRICS, stop=stop)
    assert [pair.seed for pair in result.pairs] == [1, 2]
    assert result.notes == ("interrupted after 2 of 8 pairs",)


def test_time_is_kept_after_two_pairs() -> None:
    result = compare(Bench(), A, B, schedule_for, seeds=range(8), metrics=METRICS, time_limit=0.0)
    assert len(result.pairs) == 2
    assert result.notes == ("out of time after 2 of 8 pairs",)


def test_a_slowdown_is_a_regression() -> None:
    result = compare_runs(pairs(slower=1.2), METRICS)
    verdicts = {row.metric: row.verdict for row in result.rows}
    assert verdicts == {
        "itl_p50": "regress",
        "ttft_p95": "regress",
        "throughput": "regress",
        "failed": "pass",
    }
    assert result.verdict == "regress"
    row = result.row("itl_p50")
    assert row.low < 1.2 < row.high
    assert row.ratio == pytest.approx(1.2, rel=0.02)
    assert row.a == pytest.approx(0.010, rel=0.02)


def test_the_same_thing_passes_and_a_speed_up_is_an_improvement() -> None:
    assert compare_runs(pairs(), METRICS).verdict == "pass"
    assert compare_runs(pairs(slower=0.8), METRICS).verdict == "improve"


def test_few_noisy_pairs_are_inconclusive() -> None:
    noisy = [Pair(0, records(0, gap=10), records(1, gap=13)), Pair(1, records(2, gap=12), records(3, gap=9))]
    assert compare_runs(noisy, ("itl_p50",)).verdict == "inconclusive"


def test_a_figure_by_class() -> None:
    result = compare_runs(pairs(slower=1.2), ("ttft_p50{class=short}",))
    assert result.row("ttft_p50{class=short}").verdict == "regress"


def test_failures_are_compared_as_counts() -> None:
    assert set(TOTALS) >= {"failed", "backlog"}
    rows = {
        failed: compare_runs(pairs(count=4, failed=failed), ("failed",)).row("failed") for failed in (0, 1, 3)
    }
    assert {failed: (row.a, row.b, row.verdict) for failed, row in rows.items()} == {
        0: (0, 0, "pass"),
        1: (0, 4, "inconclusive"),  # 4 of 240 happen by chance in 6 % of such comparisons
        3: (0, 12, "regress"),
    }
    assert math.isnan(rows[3].ratio)


def test_a_percentile_of_few_samples_says_of_how_many() -> None:
    row = compare_runs(pairs(), ("ttft_p99",)).rows[0]
    assert (row.verdict, row.note) == ("pass", "of 60 samples per run")
    infinite = compare_runs(pairs(failed=30), ("ttft_p95",)).rows[0]
    assert infinite.verdict == "inconclusive"
    assert infinite.note == "no figure in 8 of 8 runs of B: failed requests or no samples"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schedule_sha256": "0" * 64}, "different schedules"),
        (
            {"environment": {"model": "other", "cpus": 2}},
            r"different environments: model \('m' and 'other'\)",
        ),
        ({"environment": {"model": "m", "cpus": 2, "python": "4"}}, r"python \(None and '4'\)"),
    ],
)
def test_runs_of_different_things_are_refused(change: dict[str, Any], says: str) -> None:
    first, second = pairs(2)
    with pytest.raises(Incomparable, match=says):
        compare_runs([first, replace(second, b=replace(second.b, **change))], METRICS)


@pytest.mark.parametrize(
    "change", [{"verdict": "client_limited", "reasons": ("the client's loop was late",)}, {"partial": True}]
)
def test_a_run_that_cannot_be_believed_makes_the_comparison_invalid(change: dict[str, Any]) -> None:
    first, second = pairs(2, slower=1.5)
    result = compare_runs([first, replace(second, b=replace(second.b, **change))], METRICS)
    assert result.verdict == "invalid"
    assert result.notes[0].startswith("seed 1, B: ")
    assert compare_runs([], METRICS).verdict == "invalid"


@pytest.mark.parametrize("metric", ["speed", "ttft_p95{class=none}", "ttft_p95{short}"])
def test_unknown_metrics_are_refused_early(metric: str) -> None:
    with pytest.raises(FigureError):
        compare_runs(pairs(2), (metric,))
    bench = Bench()
    with pytest.raises(FigureError):
        compare(bench, A, B, schedule_for, seeds=range(8), metrics=(metric,))
    assert "B0" not in bench.journal


def _result() -> Comparison:
    return compare_runs(pairs(slower=1.2), (*METRICS, "ttft_p99"))


def test_json_is_plain_and_strict() -> None:
    data = json.loads(json.dumps(_result().to_json(), allow_nan=False))
    assert data["schema"] == "vtune.comparison/1"
    assert data["verdict"] == "regress"
    assert [row["metric"] for row in data["rows"]] == [*METRICS, "ttft_p99"]
    assert data["rows"][3]["ratio"] is None
    assert data["seeds"] == list(range(8))


def test_table() -> None:
    table = _result().table()
    assert table[0] == ("metric", "A", "B", "change (95% interval)", "verdict")
    assert [row[0] for row in table[1:]] == [*METRICS, "ttft_p99"]
    assert table[1][1].endswith(" ms")
    assert table[1][3].startswith("+2")
    assert "% [+" in table[1][3]
    assert table[4][3] == "n/a"
