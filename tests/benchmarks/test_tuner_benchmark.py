"""The tuner's benchmark: tables, what a launch costs and shows, the rivals, the tuner itself on a table."""

from __future__ import annotations

import math
from dataclasses import replace

import optuna
import pytest

from benchmarks.peers.tuner_rivals import RIVALS
from benchmarks.tuner.bed import Bed, Ledger, Mark, World
from benchmarks.tuner.contest import OURS, Candidate, Contest, scored, search_rival
from benchmarks.tuner.noise import Noise
from benchmarks.tuner.ours import Bookkeeper, search_ours
from benchmarks.tuner.problems import CPU, MEMORY, SEQS, THRESHOLD, TOKENS, Problem
from benchmarks.tuner.tables import (
    CPU_TIMES,
    Entry,
    Table,
    builder,
    read_table,
    scaled,
    to_json,
)
from tuner.runs.result import TrialResult
from tuner.runs.scrape import ServerFigures

PROBLEM = Problem(
    "made up", "simulated:h100", "8B", "chat", "itl_es99<60ms,ttft_es95<1s",
    {
        TOKENS: (256, 512, 1024, 2048, 4096, 8192),
        SEQS: (16, 32, 64, 128),
        MEMORY: (0.85, 0.92, 0.95),
        THRESHOLD: (0,),
    },
    rate=10.0, defaults={TOKENS: 8192, SEQS: 128}, start_seconds=10.0, run_seconds=20.0, budget=600.0,
)  # fmt: skip


def entry(tokens: int, seqs: int) -> Entry:
    """ITL grows with the budget, goodput with both; 1024 tokens are the most that are feasible."""
    goodput = 10 / (1 + 200 / tokens + 8 / seqs)
    figures = {
        "itl_es99": 0.02 + 3.5e-5 * tokens,
        "itl_p50": 0.02,
        "ttft_p50": 0.1,
        "ttft_es95": 0.3,
        "goodput": goodput,
        "throughput": 100 * goodput,
        "failed": 0.0,
        "e2e_p95": 2.0,
    }
    return Entry(figures)


@pytest.fixture(scope="module")
def table() -> Table:
    made = {PROBLEM.key(flags): entry(flags[TOKENS], flags[SEQS]) for flags in PROBLEM.configs()}
    return Table(PROBLEM, made)


def noise(spread: float) -> Noise:
    """Repeats that are ``spread`` above and below the median."""
    rows = []
    for setting in ("open loop", "closed loop"):
        for sign in (-1, 0, 1):
            figures = {
                name: [value * (1 + sign * spread), 100, value * (1 - spread), None]
                for name, value in (("itl_es99", 0.05), ("ttft_es95", 0.3), ("goodput", 8.0))
            }
            figures["completed"] = [200, 200, None, None]
            rows.append({"setting": setting, "short": figures, "whole": figures})
    return Noise(rows)


def test_a_table_knows_its_best_and_how_far_others_are_from_it(table: Table) -> None:
    best = {**PROBLEM.baseline, TOKENS: 1024, SEQS: 128}
    assert table.best == table.value(best)
    assert table.regret(best) == 0
    near = table.regret({**best, SEQS: 64})
    assert near == pytest.approx(1 - table.value({**best, SEQS: 64}) / table.best)
    assert 0 < near < 0.1
    assert table.regret({**best, TOKENS: 4096}) == 1.0, "it misses the bound on ITL"
    assert table.regret(None) == 1.0


def test_memory_that_no_plan_knows_of_is_a_crash(table: Table) -> None:
    largest = {TOKENS: 8192, SEQS: 128}
    assert table.entry({**PROBLEM.baseline, **largest, MEMORY: 0.95}).crash == ""
    fuller = replace(PROBLEM, axes={**PROBLEM.axes, SEQS: (16, 1024)})
    wide = Table(fuller, {fuller.key(f): entry(f[TOKENS], f[SEQS]) for f in fuller.configs()})
    assert wide.entry({**PROBLEM.baseline, TOKENS: 8192, SEQS: 1024, MEMORY: 0.95}).crash
    assert not wide.entry({**PROBLEM.baseline, TOKENS: 8192, SEQS: 1024, MEMORY: 0.85}).crash


def test_a_table_survives_its_file(table: Table) -> None:
    again = read_table(PROBLEM, to_json(table))
    assert again.entries.keys() == table.entries.keys()
    assert again.best == pytest.approx(table.best, rel=1e-4)


def test_limits_that_no_run_reaches_need_no_run_of_their_own() -> None:
    problem = Problem(
        "small", CPU, "bundled", "random", "itl",
        {TOKENS: (512, 4096, 8192), SEQS: (64, 128), THRESHOLD: (0, 2048)},
        rate=4.0, defaults={TOKENS: 4096, SEQS: 128}, scale=0.1,
    )  # fmt: skip
    made = builder(problem, "truth")
    found = made.table()
    assert len(found.entries) == 3 * 2 * 2 - 2, "a threshold above the budget is none"
    assert made.runs < len(found.entries) / 2
    ample, alike = ({**problem.baseline, TOKENS: tokens} for tokens in (8192, 4096))
    assert found.entries[problem.key(ample)].figures == found.entries[problem.key(alike)].figures
    told = found.entries[problem.key(ample)].server
    assert (told.preemptions, told.prefix_hits) == (0, 0)
    assert told.peak_running is not None
    assert 0 < told.peak_running < 64
    assert told.peak_kv_usage is not None
    assert 0 < told.peak_kv_usage < 1
    assert all(
        read_table(problem, to_json(found)).entries[k].server == e.server for k, e in found.entries.items()
    )


def test_a_trial_tells_what_a_real_server_would(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody was short of memory or places, none of either is searched."""
    seen: list[TrialResult] = []
    monkeypatch.setattr(Bookkeeper, "trial_ends", lambda keeper, result, outcome: seen.append(result))
    roomy = ServerFigures(peak_running=4, preemptions=0, peak_kv_usage=0.1, prefix_hits=0)
    quiet = replace(table, entries={key: replace(e, server=roomy) for key, e in table.entries.items()})
    search_ours(World(quiet, noise(0.02), seed=0), 0, None)
    whole = [result for result in seen if result.status == "measured"]
    assert {result.peak_kv_usage for result in whole} == {0.1}
    assert {result.config[MEMORY] for result in seen} == {PROBLEM.baseline[MEMORY]}


def test_a_prior_is_off_by_as_much_as_it_says() -> None:
    wrong = scaled("name", 0.3, 0.5)(CPU_TIMES)
    for name in ("weights", "per_token", "launch"):
        assert 0.3 <= abs(getattr(wrong, name) / getattr(CPU_TIMES, name) - 1) <= 0.5
    assert wrong == scaled("name", 0.3, 0.5)(CPU_TIMES), "by the problem's name, not by chance"


def test_noise_is_relative_to_the_medians_and_keeps_intervals(table: Table) -> None:
    world = World(table, noise(0.2), seed=0)
    truth = table.entry(PROBLEM.baseline).figures["itl_es99"]
    seen = {
        round(world.measurements(table.entry(PROBLEM.baseline))[1].value("itl_es99") / truth, 6)
        for _ in range(40)
    }
    assert seen == {0.8, 1.0, 1.2}
    short, _ = world.measurements(table.entry(PROBLEM.baseline))
    reading = short.reading("itl_es99")
    assert reading.low <= reading.value * 1.01
    assert math.isnan(reading.high), "that repeat had no upper end"
    assert short.value("failed") == 0.0


def test_launches_cost_what_they_cost(table: Table) -> None:
    bed = Bed(World(table, noise(0.0), seed=3))
    start, run, drain = PROBLEM.start_seconds, PROBLEM.run_seconds, 2.0
    assert bed.world.seconds == pytest.approx(start + run + drain, abs=0.11 * start)
    assert bed.ledger.launches == 1
    assert bed.ledger.infeasible == 1, "8192 tokens miss the bound"
    assert bed.best is None
    bed.measure({**PROBLEM.baseline, TOKENS: 1024})
    assert bed.best is not None
    assert [mark.launches for mark in bed.ledger.marks] == [2]


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_keeps_to_the_budget_and_finds_something(name: str, table: Table) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    world = World(table, noise(0.02), seed=1)
    ledger = search_rival(name, world, seed=1)
    assert ledger.seconds <= PROBLEM.budget + 3.0, "a load that is begun is ended"
    assert ledger.recommended is not None
    assert table.feasible(ledger.recommended)


def test_the_grid_goes_by_sequences_then_tokens_at_the_highest_memory_that_starts(table: Table) -> None:
    bed = Bed(World(table, noise(0.0), seed=0))
    RIVALS["grid (auto_tune)"](bed, 0)
    tried = [(seen.flags[SEQS], seen.flags[TOKENS]) for seen in bed.seen[1:]]
    assert tried == [(s, t) for s in PROBLEM.axes[SEQS] for t in PROBLEM.axes[TOKENS]][: len(tried)]
    assert {seen.flags[MEMORY] for seen in bed.seen[1:]} == {0.95}


@pytest.mark.parametrize("prior", [False, True])
def test_the_tuner_itself_searches_a_table(prior: bool, table: Table) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    world = World(table, noise(0.02), seed=1)
    ledger = search_ours(world, 1, table if prior else None)
    assert ledger.seconds <= 1.1 * PROBLEM.budget
    assert ledger.recommended is not None
    assert table.regret(ledger.recommended) < 0.2
    assert not world.misses(ledger.recommended)


def test_a_score_says_when_the_best_was_near() -> None:
    made = {PROBLEM.key(flags): entry(flags[TOKENS], flags[SEQS]) for flags in PROBLEM.configs()}
    world = World(Table(PROBLEM, made), noise(0.0), 0)
    best = {**PROBLEM.baseline, TOKENS: 1024}
    marks = [Mark(50.0, 2, {**best, SEQS: 16}), Mark(120.0, 4, best)]
    score = scored(world, "x", 0, Ledger(seconds=300.0, launches=9, marks=marks, recommended=best), 0.0)
    assert (score.seconds_to, score.launches_to) == (120.0, 4)
    assert score.regret_at == (0.0, 0.0, 0.0)
    assert not score.misses
    never = scored(world, "x", 1, Ledger(marks=marks[:1]), 0.0)
    assert math.isinf(never.seconds_to)
    assert never.final == 1.0, "the baseline, which misses the SLO"
    row = Candidate("x", [score, never])
    assert row.reached == 0.5
    assert row.typical_seconds == (120.0 + PROBLEM.budget) / 2
    assert row.false_share == 0.0


def test_a_contest_runs_every_method_by_its_name(table: Table) -> None:
    contest = Contest(table, {})
    assert contest.run("random", 0, noise(0.0)).method == "random"
    kinds = ("no", "wrong", "good", "fitted")
    assert set(OURS) == {f"ours, {kind} prior" for kind in kinds}
