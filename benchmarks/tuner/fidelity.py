"""What the simulator says of the bundled engine, against what is measured on it: on configs it has not seen.

    python -m benchmarks.tuner.fidelity measure DIR \
        [--quick]    # 12 minutes of a machine that does nothing else
    python -m benchmarks.tuner.fidelity compare DIR [--again DIR]

``measure`` learns the step times as ``simulated:bundled`` does, by the engine's step log under a load of its
own, and once more at the end, for what the machine has changed meanwhile. In between it serves every config
and loads it over HTTP: twelve that were chosen (three servers, four loads) and a Sobol draw of 16 over
RANGES, a server each. One of the three servers is started and loaded at the beginning, in the middle and at
the end: what it spreads by is what a measurement is worth here.

``compare`` simulates the same schedules under the same flags, five times, and takes medians. Nothing is
fitted to what is compared. Errors are of TTFT and ITL P50 and P95, all requests of a run; rho is Spearman's
over the configs. The table is by the first calibration, the last lines by both. ``--again`` says how far
another measurement is from this one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from scipy.stats.qmc import Sobol

from engine.sim.step_log import read_step_log, step_line
from engine.sim.step_times import StepSample, StepTimes
from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.plan.arrivals import Arrival, ClosedLoop, Poisson
from loadgen.plan.workload import Length, RequestClass, Schedule, Workload
from loadgen.targets.measured_steps import fit_steps, measure_steps
from loadgen.targets.server import ServerTarget
from loadgen.targets.simulated import SimulatedTarget

SERVERS = ((256, 16), (2048, 32))
REPEATED = (512, 8)
"""(max_num_batched_tokens, max_num_seqs)."""
REPEATS = 3
RANGES = {"budget": (64, 2048), "seqs": (2, 32), "clients": (1, 32), "prompt": (24, 400)}
"""Of the configs that are drawn, evenly on a log scale: closed loops of so many clients."""
DRAWN = 16
VOCAB = 49_152
METRICS = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95")
GOAL, SPREADS = 0.09, 1.5
SEEDS = 5
"""Simulated runs of a config, of which the median is taken."""
BEFORE, AFTER = "calibration", "calibration-after"


@dataclass(frozen=True)
class Load:
    """One class of work: (name, weight, mean prompt, spread, output) of its requests."""

    arrival: Arrival
    count: int
    classes: tuple[tuple[str, float, int, float, int], ...]

    def schedule(self, seed: int) -> Schedule:
        classes = [
            RequestClass(name, weight, Length(prompt, spread), Length(output))
            for name, weight, prompt, spread, output in self.classes
        ]
        workload = Workload("fidelity", tuple(classes), VOCAB)
        return workload.schedule(seed=seed, arrival=self.arrival, num_requests=self.count, warmup=2)


LOADS = {
    "chat": Load(Poisson(4.0), 80, (("chat", 1, 96, 0.6, 32),)),
    "rag": Load(Poisson(1.1), 22, (("rag", 1, 700, 0.4, 24),)),
    "mixed": Load(Poisson(1.8), 36, (("short", 3, 64, 0.5, 32), ("long", 1, 1100, 0.3, 24))),
    "batch": Load(ClosedLoop(12), 60, (("batch", 1, 150, 0.5, 48),)),
}


@dataclass(frozen=True)
class Config:
    budget: int
    seqs: int
    name: str
    load: Load

    @property
    def flags(self) -> dict[str, Any]:
        return {"max_model_len": 2048, "max_num_batched_tokens": self.budget, "max_num_seqs": self.seqs}

    @property
    def schedule(self) -> Schedule:
        return self.load.schedule(77 + self.budget)

    def file(self, folder: Path, repeat: int) -> Path:
        return folder / f"{self.budget}-{self.seqs}-{self.name}-{repeat}.json"


def chosen(server: tuple[int, int]) -> list[Config]:
    return [Config(*server, name, load) for name, load in LOADS.items()]


def drawn() -> list[Config]:
    low, high = np.log(list(RANGES.values())).T
    points = np.exp(low + (high - low) * Sobol(len(RANGES), seed=0).random(DRAWN))
    configs = []
    for budget, seqs, clients, prompt in points.round().astype(int).tolist():
        load = Load(ClosedLoop(clients), 16 + 2 * clients, (("drawn", 1, prompt, 0.5, 32),))
        configs.append(Config(budget, seqs, f"{clients}x{prompt}", load))
    return configs


def servers(quick: bool) -> list[tuple[list[Config], int]]:
    """What each server is loaded with, in this order, and which repeat of it that is."""
    if quick:
        return [(chosen(SERVERS[0]), 0)]
    singles = [(configs, 0) for configs in (*([config] for config in drawn()), *map(chosen, SERVERS))]
    gap = len(singles) // (REPEATS - 1)
    for repeat in range(REPEATS):
        singles.insert(repeat * (gap + 1), (chosen(REPEATED), repeat))
    return singles


def calibrate(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    samples, runs = measure_steps()
    (folder / "steps").write_text("".join(f"{step_line(sample)}\n" for sample in samples))
    for number, run in enumerate(runs):
        run.save(folder / f"{number:02}.json")


def learnt(*folders: Path) -> StepTimes:
    """From what ``calibrate`` saw."""
    samples: list[StepSample] = []
    runs: list[Records] = []
    for folder in folders:
        samples += read_step_log((folder / "steps").read_text())
        runs += [Records.load(file) for file in sorted(folder.glob("*.json"))]
    return fit_steps(samples, runs)


def measure(folder: Path, quick: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    calibrate(folder / BEFORE)
    for configs, repeat in servers(quick):
        with ServerTarget.bundled().open(configs[0].flags) as opened:
            for config in configs:
                opened.run(config.schedule).save(config.file(folder, repeat))
                print(f"measured {config.file(folder, repeat)}", flush=True)
    calibrate(folder / AFTER)


def figures(records: Records) -> dict[str, float]:
    whole = Summary(replace(records, window=(0.0, max(r.end for r in records.requests) / 1e9)))
    return {metric: whole.distribution(metric[:-4]).rank(int(metric[-2:]) / 100) * 1e3 for metric in METRICS}


def all_configs() -> list[Config]:
    return [*(config for server in (*SERVERS, REPEATED) for config in chosen(server)), *drawn()]


def measured(folder: Path) -> dict[Config, list[dict[str, float]]]:
    """The figures of each run of the configs that were measured."""
    files = {config: [config.file(folder, repeat) for repeat in range(REPEATS)] for config in all_configs()}
    runs = {
        config: [figures(Records.load(file)) for file in names if file.is_file()]
        for config, names in files.items()
    }
    return {config: found for config, found in runs.items() if found}


def medians(runs: dict[Config, list[dict[str, float]]]) -> dict[Config, dict[str, float]]:
    return {
        config: {metric: statistics.median(run[metric] for run in found) for metric in METRICS}
        for config, found in runs.items()
    }


def predicted(times: StepTimes, configs: Iterable[Config]) -> dict[Config, dict[str, float]]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(times.to_json())
        file.flush()
        targets = [SimulatedTarget(f"simulated:{file.name}", "bundled", seed=seed) for seed in range(SEEDS)]
    runs: dict[Config, list[dict[str, float]]] = {config: [] for config in configs}
    for config, target in product(runs, targets):
        with target.open(config.flags) as server:
            runs[config].append(figures(server.run(config.schedule)))
    return medians(runs)


def compare(folder: Path, again: Path | None) -> bool:
    """Print the table, and who keeps to what. True: the goal is met by the first calibration."""
    runs = measured(folder)
    seen = medians(runs)
    said = predicted(learnt(folder / BEFORE), runs)
    print(f"{'budget seqs load':24}" + "".join(f"{metric + ' ms':>26}" for metric in METRICS))
    for config in runs:
        pairs = [(seen[config][metric], said[config][metric]) for metric in METRICS]
        cells = "".join(f"{a:11.1f} {b:8.1f} {b / a - 1:+6.0%}" for a, b in pairs)
        print(f"{config.budget:5} {config.seqs:4} {config.name:13}{cells}")
    spreads = {metric: statistics.median([*_spreads(metric, runs.values())] or [0.0]) for metric in METRICS}
    print(f"\n{'':36}" + "".join(f"{metric:>22}" for metric in METRICS))
    print(f"{'allowed':36}" + "".join(f"{max(GOAL, SPREADS * spreads[m]):14.1%}    0.95" for m in METRICS))
    met = _row("simulated", said, seen, spreads)
    if (folder / AFTER).is_dir():
        both = predicted(learnt(folder / BEFORE, folder / AFTER), runs)
        _row("simulated, by both calibrations", both, seen, spreads)
    if again:
        _row("measured again", medians(measured(again)), seen, spreads)
    print("(median error, rho)")
    return met


def _spreads(metric: str, runs: Iterable[list[dict[str, float]]]) -> Iterator[float]:
    """Of the repeats of each config that has some, relative to their median."""
    for found in runs:
        values = [run[metric] for run in found]
        if len(values) > 1:
            yield (max(values) - min(values)) / statistics.median(values)


def _row(
    name: str,
    said: dict[Config, dict[str, float]],
    seen: dict[Config, dict[str, float]],
    spreads: dict[str, float],
) -> bool:
    """Print the median errors of ``said``, and its ranks. True: they are allowed."""
    met, cells, everything = True, "", []
    shared = [config for config in seen if config in said]
    for metric in METRICS:
        pairs = [(said[config][metric], seen[config][metric]) for config in shared]
        errors = [abs(a / b - 1) for a, b in pairs]
        error, rho = statistics.median(errors), float(spearmanr(*zip(*pairs, strict=True)).statistic)
        met &= error <= max(GOAL, SPREADS * spreads[metric]) and rho >= 0.95
        cells += f"{error:14.1%}  {rho:6.3f}"
        everything += errors
    print(f"{name:36}{cells}   all {statistics.median(everything):.1%} of {len(everything)}")
    return met


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=("measure", "compare"))
    parser.add_argument("folder", type=Path, nargs="?", help="where runs are kept [a temporary one]")
    parser.add_argument("--quick", action="store_true", help="one server, once")
    parser.add_argument("--again", type=Path, metavar="DIR", help="another measurement of the same")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fidelity-"))
    if options.act == "measure":
        measure(folder, options.quick)
    raise SystemExit(0 if compare(folder, options.again) else 1)


if __name__ == "__main__":
    main()
