"""How well a simulator fitted to a server predicts the configs that it was not fitted to.

    python -m benchmarks.tuner.fitted_simulator [--quick] [--problems chat,measured] [--configs 30]

The truth is a simulated server: by a data sheet, or by step times that were measured on the bundled engine of
this machine, with their curve, their spread and what HTTP adds. Its baseline is measured, and a simulator is
fitted to it (``tuner/search/fitted_simulator.py``), as ``vtune optimize --prior sketch`` does; then both run
the same configs, drawn at random, under the load of the baseline. Configs that do not start are left out.

For each figure: Spearman's rank correlation, and the median error, over the configs. ``baseline``: the median
error of the figures that it was fitted to. ``cpu``: seconds of the fit.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from itertools import islice

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scipy.stats import spearmanr

from benchmarks.tuner.contest import chosen, print_lines
from benchmarks.tuner.fitted_simulator_problems import fitted_simulator_of
from benchmarks.tuner.problems import CPU_AXES, PROBLEMS, SEQS, TOKENS, Problem
from benchmarks.tuner.tables import Builder, server_of

MEASURED_STEPS = tuple(
    Problem(
        f"{workload} {slo} by measured steps", "simulated:bundled", "bundled", workload, slo, CPU_AXES,
        rate=rate, concurrency=concurrency, scale=0.1, defaults={TOKENS: 512, SEQS: 32}, run_seconds=20.0,
    )
    for workload, slo, rate, concurrency in (
        ("mixed", "itl", 1.6, None), ("chat", "ttft", 1.5, None), ("batch", "throughput", None, 24),
    )
)  # fmt: skip
"""The bundled model's server, as it was measured here; see docs/simulate.md."""
TRUTHS = (*PROBLEMS, *MEASURED_STEPS)
FIGURES = ("itl_p50", "itl_p99", "ttft_p95", "throughput")
HEADS = ("truth", "configs", *(part for name in FIGURES for part in (name, "error")), "baseline", "cpu")


def compare(problem: Problem, count: int) -> list[str]:
    """A line of the table."""
    truth = Builder(problem, server_of(problem))
    baseline = truth.entry(problem.baseline)
    begun = time.process_time()
    fitted = fitted_simulator_of(problem, baseline)
    cpu = time.process_time() - begun
    simulated = Builder(problem, fitted.target)
    configs = list(problem.configs())
    random.Random(problem.name).shuffle(configs)
    pairs = ((found, simulated.entry(flags)) for flags in configs if not (found := truth.entry(flags)).crash)
    rows = list(islice(pairs, count))
    cells = [problem.name, str(len(rows))]
    for name in FIGURES:
        both = [
            (a.figures[name], b.figures[name]) for a, b in rows if name in a.figures and name in b.figures
        ]
        cells += [
            f"{spearmanr(both).statistic:.2f}",
            f"{statistics.median(abs(b / a - 1) for a, b in both):.0%}",
        ]
    errors = statistics.median(abs(error) for error in fitted.errors.values())
    return [*cells, f"{errors:.0%}", f"{cpu:.1f} s"]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", default="", help="words that their names contain; all by default")
    parser.add_argument("--configs", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="two truths, ten configs each")
    given = parser.parse_args(words)
    names = chosen([problem.name for problem in TRUTHS], given.problems)[: 2 if given.quick else None]
    lines: list[Sequence[str]] = [HEADS]
    for problem in (problem for problem in TRUTHS if problem.name in names):
        lines.append(compare(problem, 10 if given.quick else given.configs))
        print("; ".join(lines[-1]), flush=True)
    print_lines("", lines)


if __name__ == "__main__":
    main()
