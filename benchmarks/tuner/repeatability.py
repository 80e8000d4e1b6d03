"""Does ``vtune optimize`` find the same right answer every time? Simulated studies whose truth is known.

    python -m benchmarks.tuner.repeatability [--quick] [--studies 30] [--cells "chat;rag"] [--json]
    python -m benchmarks.tuner.repeatability --without all --cells "cores, mixed" --studies 4

Every study is the tuner's own code on a simulated server, with a seed of its own and with noise: each load
finds the server faster or slower by a factor whose logarithm has a deviation of LUCK. What a study recommends
is judged by long simulations without that noise, on requests that no study had: of the baseline, of the
recommended config, and of the best one known. The best is searched for among everything that any study of
the cell measured, and a coarse grid; a short simulation of each chooses those that get a long one.

Studies and simulations are kept in ``--out`` as soon as they are done, and are not done again.

Columns: share of studies that recommend; of the recommendations, the share whose objective is within NEAR of
the best, and the share that is false (no gain, or a bound is missed by more than EDGE); the share that has
the most common move, a knob with its direction; medians of trials and of simulated seconds. A cell counts as
having something to gain from WORTH on, or where its baseline misses the SLO.

``--without`` switches off one mechanism of the search after the other, and prints what that costs.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small matrices threads only wait for each other
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import optuna

from benchmarks.tuner.noisy_studies import CELLS, MECHANISMS, Cell, Flags, Study, search
from benchmarks.tuner.problems import SEQS, THRESHOLD, TOKENS
from benchmarks.tuner.tables import EDGE
from loadgen.target import TargetFailed
from loadgen.targets.simulated import SimulatedTarget, gpu_defaults
from servers.files import write_atomically
from servers.slo.objective import Slo
from tuner.runs.load import load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.result import Measurement, Reading

NEAR, WORTH = 0.05, 0.15
SCREEN, LONG = (1, 60.0), (4, 120.0)
"""Runs and the seconds of each, at least, of a short and of a long simulation."""
FINALISTS = 6
"""Configs that get a long simulation because of their short one."""


class Kept:
    """Studies and simulations in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def study(self, cell: Cell, seed: int, without: str = "") -> Study:
        path = self._path("study", cell.name, without, str(seed))
        if not path.is_file():
            write_atomically(path, [json.dumps(asdict(search(cell, seed, without)), indent=1)])
        data = json.loads(path.read_text())
        return Study(**{**data, "measured": tuple(data["measured"])})

    def figures(self, cell: Cell, flags: Flags, size: tuple[int, float]) -> Measurement | None:
        """What a config truly measures; None where it does not start."""
        words = json.dumps(flags, sort_keys=True)
        path = self._path("truth", cell.name, str(size[0]), hashlib.sha256(words.encode()).hexdigest()[:16])
        if not path.is_file():
            found = simulate(cell, flags, *size)
            write_atomically(path, [json.dumps({"flags": flags, "figures": found}, indent=1)])
        told = json.loads(path.read_text())["figures"]
        return told and Measurement({name: Reading(value) for name, value in told.items()}, 0.0)

    def _path(self, *words: str) -> Path:
        plain = "-".join("".join(c if c.isalnum() else "_" for c in word) for word in words if word)
        return self.folder / f"{plain}.json"


def simulate(cell: Cell, flags: Flags, runs: int, seconds: float) -> dict[str, float] | None:
    target, load = SimulatedTarget(cell.target, cell.model), cell.load(seconds)
    done = []
    try:
        for seed in load.confirmation_seeds(runs):
            schedule = load.confirmation(seed)
            with target.open(flags) as server:
                done.append(Run(server.run(schedule), load_seconds(schedule)))
    except TargetFailed:
        return None
    return {name: reading.value for name, reading in measure(done, cell.slo).readings.items()}


@dataclass(frozen=True)
class Truth:
    """What configs of a cell truly are, the baseline's included."""

    slo: Slo
    baseline: Measurement

    def misses(self, config: Measurement, edge: float = 0.0) -> bool:
        bounds = self.slo.resolve(self.baseline.value)
        return any(not v <= edge for v in config.violations(bounds).values())

    def value(self, config: Measurement) -> float:
        return config.value(self.slo.objective.metric, self.slo.objective.cls)

    def gain(self, config: Measurement) -> float:
        """Share by which the objective is better than the baseline's; infinite where that misses the SLO and
        ``config`` does not."""
        if self.misses(self.baseline, EDGE) and not self.misses(config, EDGE):
            return math.inf
        ours, theirs = self.value(config), self.value(self.baseline)
        return 1 - ours / theirs if self.slo.objective.direction == "minimize" else ours / theirs - 1

    def false(self, config: Measurement | None) -> bool:
        return config is None or self.misses(config, EDGE) or not self.gain(config) > 0

    def near(self, config: Measurement | None, best: Measurement) -> bool:
        """Whether it holds the SLO, and its objective is within NEAR of the best."""
        if config is None or self.misses(config, EDGE):
            return False
        ours, theirs = self.value(config), self.value(best)
        slack = 1 + NEAR if self.slo.objective.direction == "minimize" else 1 - NEAR
        return not self.slo.objective.better(slack * theirs, ours)

    def ranked(self, configs: Mapping[str, Measurement]) -> list[str]:
        """Those that hold the SLO, the best first."""
        sign = 1 if self.slo.objective.direction == "minimize" else -1
        held = [name for name, config in configs.items() if not self.misses(config)]
        return sorted(held, key=lambda name: sign * self.value(configs[name]))


@dataclass(frozen=True)
class Verdict:
    """On the studies of a cell."""

    cell: str
    studies: int
    best_gain: float
    recommended: int
    near: int
    false: int
    same_move: int
    move: str
    """The most common one."""
    gains: tuple[float, ...]
    """Of the recommendations."""
    trials: float
    seconds: float

    @property
    def something(self) -> bool:
        return self.best_gain >= WORTH


def judged(
    name: str,
    truth: Truth,
    best: Measurement,
    studies: Sequence[Study],
    of: Mapping[int, Measurement | None],
) -> Verdict:
    """``of``: by the study's seed, what is recommended truly is."""
    told = [study for study in studies if study.recommended is not None]
    found = [of[study.seed] for study in told]
    moves = Counter(move for study in told for move in directions(study.moves))
    move, count = moves.most_common(1)[0] if moves else ("", 0)
    return Verdict(
        name,
        len(studies),
        truth.gain(best),
        len(told),
        sum(truth.near(config, best) for config in found),
        sum(map(truth.false, found)),
        count,
        move,
        tuple(truth.gain(config) for config in found if config is not None),
        statistics.median(study.trials for study in studies),
        statistics.median(study.seconds for study in studies),
    )


def directions(moves: Mapping[str, Sequence[Any]]) -> list[str]:
    """``max_num_seqs up``. A threshold of 0 is none, and so the largest."""
    found = []
    for flag, (old, new) in moves.items():
        if isinstance(old, int | float) and isinstance(new, int | float):
            a, b = ((math.inf if flag == THRESHOLD and not v else v) for v in (old, new))
            found.append(f"{flag} {'up' if b > a else 'down'}")
        else:
            found.append(f"{flag} {new}")
    return found


def coarse_grid(cell: Cell) -> Iterator[Flags]:
    base = {**gpu_defaults(cell.target), **cell.flags}
    small = cell.context < 32_768
    tokens = (64, 128, 256, 512, 2048) if small else (256, 512, 1024, 2048, 8192)
    for values in itertools.product(tokens, (8, 128) if small else (64, 1024), (0, 128 if small else 1024)):
        yield {**base, **dict(zip((TOKENS, SEQS, THRESHOLD), values, strict=True))}


def judge(kept: Kept, cell: Cell, studies: Sequence[Study]) -> Verdict:
    """By long simulations, of which those that are missing are made."""
    own = {**gpu_defaults(cell.target), **cell.flags}
    short = kept.figures(cell, own, SCREEN)
    baseline = kept.figures(cell, own, LONG)
    assert short is not None, "baselines start"
    assert baseline is not None, "baselines start"
    tried = {
        json.dumps(f, sort_keys=True): f
        for f in (*coarse_grid(cell), *(f for s in studies for f in s.measured))
    }
    screened = {key: kept.figures(cell, flags, SCREEN) for key, flags in tried.items()}
    ranked = Truth(cell.slo, short).ranked({key: value for key, value in screened.items() if value})
    truth = Truth(cell.slo, baseline)
    of = {s.seed: kept.figures(cell, s.recommended, LONG) for s in studies if s.recommended}
    finalists = [kept.figures(cell, tried[key], LONG) for key in ranked[:FINALISTS]]
    known = {str(n): value for n, value in enumerate([baseline, *finalists, *of.values()]) if value}
    first = next(iter(truth.ranked(known)), "0")
    return judged(cell.name, truth, known[first], studies, of)


def rows_of(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    head = ("cell", "studies", "best gain", "recommend", "near the best", "false", "the same move",
            "median gain", "trials", "simulated s")  # fmt: skip
    return [head, *map(_row, verdicts)]


def _row(v: Verdict) -> tuple[str, ...]:
    many = f"{v.move}: {v.same_move}" if v.recommended else "-"
    return (
        v.cell,
        str(v.studies),
        share(v.best_gain),
        f"{v.recommended} of {v.studies}",
        str(v.near),
        str(v.false),
        many,
        share(statistics.median(v.gains)) if v.gains else "-",
        f"{v.trials:.0f}",
        f"{v.seconds:.0f}",
    )


def share(value: float) -> str:
    return "holds the SLO" if value == math.inf else f"{value:.0%}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Over all cells, with what is aimed at."""
    some, none = ([v for v in verdicts if v.something is wanted] for wanted in (True, False))
    studies, told = sum(v.studies for v in some), sum(v.recommended for v in some)
    every = told + sum(v.recommended for v in none)
    lines = [
        f"recommend where {WORTH:.0%} or more is to be gained: {told} of {studies} (aim: 95 %)",
        f"within {NEAR:.0%} of the best: {sum(v.near for v in some)} of {told} (aim: 90 %)",
        f"false: {sum(v.false for v in verdicts)} of {every} (aim: at most 1 %)",
        f"recommended where nothing is to be gained: {every - told} of "
        f"{sum(v.studies for v in none)} (aim: 0)",
    ]
    return "\n".join(lines)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def ablated(kept: Kept, cells: Sequence[Cell], names: Sequence[str], seeds: range) -> list[tuple[str, ...]]:
    """A row per mechanism: of all studies of the cells how many recommend, what that truly gains (a study
    without a recommendation gains nothing), and what it took."""
    rows: list[tuple[str, ...]] = [
        ("without", "recommend", "false", "mean gain", "median gain", "trials", "simulated s")
    ]
    for name in names:
        pairs = [(cell, kept.study(cell, seed, name)) for cell in cells for seed in seeds]
        gains, false = [], 0
        for cell, study in pairs:
            own = kept.figures(cell, {**gpu_defaults(cell.target), **cell.flags}, LONG)
            assert own is not None, "baselines start"
            truth = Truth(cell.slo, own)
            found = kept.figures(cell, study.recommended, LONG) if study.recommended else own
            wrong = study.recommended is not None and truth.false(found)
            false += wrong
            gains.append(truth.gain(found) if found is not None and not wrong else 0.0)
        studies = [study for _, study in pairs]
        rows.append(
            (
                name,
                f"{sum(s.recommended is not None for s in studies)} of {len(studies)}",
                str(false),
                share(statistics.mean(gains)),
                share(statistics.median(gains)),
                f"{statistics.mean(s.trials for s in studies):.1f}",
                f"{statistics.mean(s.seconds for s in studies):.0f}",
            )
        )
    return rows


def chosen(names: Sequence[str], words: str) -> list[str]:
    """Those that contain one of the words, or all."""
    wanted = [word.strip().lower() for word in words.split(";") if word.strip()]
    return [name for name in names if not wanted or any(word in name.lower() for word in wanted)]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="", help="words that their names contain, apart by ;")
    parser.add_argument("--studies", type=int, default=30, help="of each cell")
    parser.add_argument("--quick", action="store_true", help="three studies of each cell")
    parser.add_argument("--without", help="a mechanism of the search to switch off, or all in turn")
    parser.add_argument("--out", type=Path, default=Path("runs/repeatability"), help="what was done is here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = chosen([cell.name for cell in CELLS], given.cells)
    cells = [cell for cell in CELLS if cell.name in names]
    kept, seeds = Kept(given.out), range(1, 1 + (3 if given.quick else given.studies))
    if given.without:
        switched = ["nothing", *chosen(list(MECHANISMS)[1:], given.without.replace("all", ""))]
        print_table(ablated(kept, cells, switched, seeds))
        return
    verdicts = [judge(kept, cell, [kept.study(cell, seed) for seed in seeds]) for cell in cells]
    if given.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
        return
    print_table(rows_of(verdicts))
    print(f"\n{summary(verdicts)}")


if __name__ == "__main__":
    main()
