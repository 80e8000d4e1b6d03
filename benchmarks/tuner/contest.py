"""The tuner against other ways to search, on problems whose answers are known.

    python -m benchmarks.tuner.contest [--quick] [--problems chat,rag] [--methods ours,TPE] [--seeds 30]

Every problem is an exhaustive table (``tuner_problems.py``) behind the noise of real repeats
(``tuner_noise.py``). Launches cost all methods the same seconds, and all have the same budget; what a method
saves, it saves itself: by ending a run early, or by not launching at all. ``ours`` is the tuner's own code,
``tuner.study.optimize.Optimizer``, on a bench that looks runs up: with rungs, early stops, the strategy
and the confirmation, whose seconds count. It is run without a prior, with one that is wrong (another card, or
coefficients 30 to 50 % off), with one within a tenth, and with the simulator that it fits to the baseline.

Columns: of all seeds, the median time until the config that a method would recommend is truly feasible and
within 5 % of the best feasible one, in seconds and in launches, and the share of seeds that got there (those
that did not count as never, in the median too); the median regret after 10, 20 and 30 launches, and of what
is recommended in the end (no recommendation: the baseline's); launches that crashed, and those whose config
truly misses the SLO, crashes included; seconds of the whole search; how many of the configs that were
recommended miss the SLO on fresh runs. A search that never gets there is given the whole budget where times
are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small matrices threads only wait for each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import optuna

from benchmarks.peers.tuner_rivals import RIVALS
from benchmarks.tuner.bed import Bed, BudgetSpent, Ledger, World
from benchmarks.tuner.fitted_simulator_problems import fitted_table
from benchmarks.tuner.noise import REPEATS, Noise
from benchmarks.tuner.ours import search_ours
from benchmarks.tuner.problems import MEASURED, PROBLEMS, Problem
from benchmarks.tuner.tables import Table, describe, table

EVERY = (*PROBLEMS, MEASURED)
NEAR = 0.05
"""Within this share of the best a config is as good as found."""
AT = (10, 20, 30)
"""Launches after which regret is looked at."""
OURS: Mapping[str, str | None] = {
    "ours, no prior": None,
    "ours, wrong prior": "wrong",
    "ours, good prior": "good",
    "ours, fitted prior": "fitted",
}


def search_rival(name: str, world: World, seed: int) -> Ledger:
    bed = Bed(world)
    try:
        bed.ledger.recommended = RIVALS[name](bed, seed)
    except BudgetSpent:  # before its own rule could say anything
        bed.ledger.recommended = None if bed.best is None else bed.best.flags
    bed.ledger.seconds = world.seconds
    return bed.ledger


@dataclass(frozen=True)
class Score:
    """What came of one search. Infinite: never."""

    problem: str
    method: str
    seed: int
    seconds_to: float
    launches_to: float
    budget: float
    regret_at: tuple[float, ...]
    final: float
    """Regret of what is recommended; that of the baseline where nothing is."""
    recommended: bool
    misses: bool
    launches: int
    crashes: int
    infeasible: int
    seconds: float
    cpu: float


def scored(world: World, method: str, seed: int, ledger: Ledger, cpu: float) -> Score:
    table = world.table
    reached = next((m for m in ledger.marks if table.regret(m.flags) <= NEAR), None)
    baseline = world.problem.baseline

    def regret_after(launches: int) -> float:
        marks = [m for m in ledger.marks if m.launches <= launches]
        return table.regret(marks[-1].flags if marks else None)

    recommended = ledger.recommended
    return Score(
        problem=world.problem.name,
        method=method,
        seed=seed,
        seconds_to=reached.seconds if reached else math.inf,
        launches_to=reached.launches if reached else math.inf,
        budget=world.problem.budget,
        regret_at=tuple(regret_after(n) for n in AT),
        final=table.regret(baseline if recommended is None else recommended),
        recommended=recommended is not None,
        misses=recommended is not None and world.misses(recommended),
        launches=ledger.launches,
        crashes=ledger.crashes,
        infeasible=ledger.infeasible,
        seconds=ledger.seconds,
        cpu=cpu,
    )


@dataclass(frozen=True)
class Contest:
    """A problem with what its priors say."""

    truth: Table
    priors: Mapping[str, Table]

    @property
    def problem(self) -> Problem:
        return self.truth.problem

    def run(self, method: str, seed: int, noise: Noise) -> Score:
        world, begun = World(self.truth, noise, seed), time.process_time()
        if method in RIVALS:
            ledger = search_rival(method, world, seed)
        else:
            kind = OURS.get(method)
            ledger = search_ours(world, seed, None if kind is None else self.priors[kind])
        return scored(world, method, seed, ledger, time.process_time() - begun)


def contest(problem: Problem, kinds: Sequence[str]) -> Contest:
    return Contest(table(problem), {kind: prior(problem, kind) for kind in kinds})


def prior(problem: Problem, kind: str) -> Table:
    return fitted_table(problem) if kind == "fitted" else table(problem, kind)


@dataclass(frozen=True)
class Candidate:
    """One method on one problem, over its seeds."""

    method: str
    scores: Sequence[Score]

    def median(self, name: str) -> float:
        return statistics.median(getattr(score, name) for score in self.scores)

    @property
    def reached(self) -> float:
        return statistics.mean(math.isfinite(score.seconds_to) for score in self.scores)

    @property
    def typical_seconds(self) -> float:
        """Median seconds to within NEAR; the budget for those that never get there."""
        return statistics.median(min(score.seconds_to, score.budget) for score in self.scores)

    @property
    def false_share(self) -> float:
        """Of the recommendations."""
        made = [score for score in self.scores if score.recommended]
        return statistics.mean(score.misses for score in made) if made else math.nan

    def cells(self) -> Iterator[str]:
        yield self.method
        yield _number(self.median("seconds_to"))
        yield _number(self.median("launches_to"))
        yield f"{self.reached:.0%}"
        for at in range(len(AT)):
            yield f"{statistics.median(score.regret_at[at] for score in self.scores):.0%}"
        yield f"{self.median('final'):.0%}"
        yield f"{statistics.mean(score.crashes for score in self.scores):.1f}"
        yield f"{statistics.mean(score.infeasible for score in self.scores):.1f}"
        yield f"{statistics.mean(score.launches for score in self.scores):.0f}"
        yield _number(self.median("seconds"))
        yield f"{sum(score.recommended for score in self.scores)} of {len(self.scores)}"
        yield "n/a" if math.isnan(self.false_share) else f"{self.false_share:.0%}"


HEADS = (
    "method", "s to 5 %", "launches", "got there", *(f"regret@{n}" for n in AT), "in the end", "crashes",
    "infeasible", "of", "s in all", "recommended", "false",
)  # fmt: skip


def _number(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.0f}"


def print_rows(title: str, rows: Sequence[Candidate]) -> None:
    print_lines(title, [HEADS, *(tuple(row.cells()) for row in rows)])


def print_lines(title: str, lines: Sequence[Sequence[str]]) -> None:
    """A table: the first column to the left, all others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    print(f"\n{title}" if title else "")
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join((line[0].ljust(widths[0]), *cells)))


def print_ratios(by_problem: Mapping[str, Sequence[Candidate]]) -> None:
    """Every method's typical seconds to within NEAR, as a ratio to the best rival's of the problem."""
    methods = list(dict.fromkeys(row.method for rows in by_problem.values() for row in rows))
    lines = [
        ("seconds to within 5 % / best rival's", "the best rival", *(name.split(" (")[0] for name in methods))
    ]
    logs: dict[str, list[float]] = {name: [] for name in methods}
    for problem, rows in by_problem.items():
        rivals = [row for row in rows if row.method in RIVALS]
        if not rivals:
            continue
        best = min(rivals, key=lambda row: row.typical_seconds)
        ratios = {row.method: row.typical_seconds / best.typical_seconds for row in rows}
        for name, ratio in ratios.items():
            logs[name].append(math.log(ratio))
        shown = (f"{ratios[name]:.2f}" if name in ratios else "" for name in methods)
        lines.append((problem, f"{best.method} {best.typical_seconds:.0f}", *shown))
    means = (f"{math.exp(statistics.mean(logs[name])):.2f}" if logs[name] else "" for name in methods)
    lines.append(("geometric mean", "", *means))
    print_lines("", lines)


def print_overall(by_problem: Mapping[str, Sequence[Candidate]]) -> None:
    """What came of all searches of each method."""
    lines = [
        (
            "all problems",
            "got there",
            "recommended",
            "false",
            "regret in the end",
            "crashes",
            "infeasible",
            "s in all",
        )
    ]
    for method in dict.fromkeys(row.method for rows in by_problem.values() for row in rows):
        scores = [
            s for rows in by_problem.values() for row in rows if row.method == method for s in row.scores
        ]
        row, launches = Candidate(method, scores), sum(score.launches for score in scores)
        lines.append(
            (
                method,
                f"{row.reached:.0%}",
                f"{sum(score.recommended for score in scores) / len(scores):.0%}",
                "n/a" if math.isnan(row.false_share) else f"{row.false_share:.1%}",
                f"{statistics.mean(score.final for score in scores):.0%}",
                f"{sum(score.crashes for score in scores) / launches:.0%}",
                f"{sum(score.infeasible for score in scores) / launches:.0%}",
                f"{statistics.mean(score.seconds / score.budget for score in scores):.0%} of the budget",
            )
        )
    print_lines("", lines)


def read_scores(path: Path | None) -> dict[tuple[str, str, int], Score]:
    """Those that a run before this one wrote, by problem, method and seed."""
    if path is None or not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    scores = [Score(**{**row, "regret_at": tuple(row["regret_at"])}) for row in rows]
    return {(score.problem, score.method, score.seed): score for score in scores}


def append_score(path: Path | None, score: Score) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(score)) + "\n")


def chosen(names: Sequence[str], words: str) -> list[str]:
    """Those that contain one of the words, or all."""
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    return [name for name in names if not wanted or any(word in name.lower() for word in wanted)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="", help="words that their names contain; all by default")
    parser.add_argument("--methods", default="", help="words that their names contain; all by default")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="three seeds of two problems")
    parser.add_argument("--noise", type=Path, default=REPEATS, help="the repeats to draw from")
    parser.add_argument(
        "--out",
        type=Path,
        help="keep every search's score here; those that are there already are not searched again",
    )
    parser.add_argument("--report", action="store_true", help="print what --out holds, and search nothing")
    given = parser.parse_args(words)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    noise = Noise.read(given.noise)
    methods = chosen([*RIVALS, *OURS], given.methods)
    kinds = [kind for name, kind in OURS.items() if kind and name in methods]
    names = chosen([problem.name for problem in EVERY], given.problems)[: 2 if given.quick else None]
    done = read_scores(given.out)
    by_problem: dict[str, list[Candidate]] = {}
    for problem in (problem for problem in EVERY if problem.name in names):
        found, rows = contest(problem, kinds), []
        for method in methods:
            scores = []
            for seed in range(3 if given.quick else given.seeds):
                score = done.get((problem.name, method, seed))
                if score is None and not given.report:
                    score = found.run(method, seed, noise)
                    append_score(given.out, score)
                scores += [score] if score else []
            if scores:
                rows.append(Candidate(method, scores))
        by_problem[problem.name] = rows
        print_rows(describe(found.truth), rows)
    print_ratios(by_problem)
    print_overall(by_problem)
    cpu = sum(score.cpu for rows in by_problem.values() for row in rows for score in row.scores)
    print(f"\n{cpu:.0f} s of processor time for the searches")


if __name__ == "__main__":
    main()
