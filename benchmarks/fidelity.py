"""What the simulator says of the bundled engine, against what is measured on it: on configs it has not seen.

    python -m benchmarks.fidelity measure DIR [--quick]    # 12 minutes of a machine that does nothing else
    python -m benchmarks.fidelity compare DIR

``measure`` learns the step times as ``simulated:bundled`` does, by the engine's step log under a load of its
own. Then it serves every config and loads it over HTTP: twelve that were chosen (three servers, four loads)
and a Sobol draw of 16 over the ranges of RANGES, a server each. One of the three servers is started and
loaded at the beginning, in the middle and at the end: what it spreads by is what a measurement is worth here.
``compare`` simulates the same schedules under the same flags. Nothing is fitted to what is compared. Errors
are of TTFT and ITL P50 and P95, all requests of a run; rho is Spearman's over the configs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr
from scipy.stats.qmc import Sobol

from engine.step_log import read_step_log, step_line
from engine.step_times import StepTimes
from loadgen.arrivals import Arrival, ClosedLoop, Poisson
from loadgen.record import Records
from loadgen.targets.server import ServerTarget
from loadgen.targets.simulated import SimulatedTarget, fit_steps, measure_steps
from loadgen.workload import Length, RequestClass, Schedule, Workload

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
    def flags(self) -> dict[str, int]:
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


def learnt(folder: Path) -> StepTimes:
    """From what ``measure`` saw of the load that teaches."""
    samples = read_step_log((folder / "calibration.steps").read_text())
    return fit_steps(samples, [Records.load(file) for file in folder.glob("calibration-*.json")])


def measure(folder: Path, quick: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    samples, runs = measure_steps()
    (folder / "calibration.steps").write_text("".join(f"{step_line(sample)}\n" for sample in samples))
    for number, run in enumerate(runs):
        run.save(folder / f"calibration-{number}.json")
    for configs, repeat in servers(quick):
        log = configs[0].file(folder, repeat).with_suffix(".steps")
        target = ServerTarget.bundled(env={"VTUNE_STEP_LOG": str(log)})
        with target.open(configs[0].flags) as opened:
            for config in configs:
                opened.run(config.schedule).save(config.file(folder, repeat))
                print(f"measured {config.file(folder, repeat)}", flush=True)


def figures(records: Records) -> dict[str, float]:
    whole = replace(records, window=(0.0, max(r.end for r in records.requests) / 1e9)).summary()
    return {metric: whole.distribution(metric[:-4]).rank(int(metric[-2:]) / 100) * 1e3 for metric in METRICS}


def predict(target: SimulatedTarget, config: Config) -> dict[str, float]:
    with target.open(config.flags) as server:
        return figures(server.run(config.schedule))


def compare(folder: Path) -> bool:
    """Print the table. True: the goal is met."""
    times = folder / "times.json"
    times.write_text(learnt(folder).to_json() + "\n")
    target = SimulatedTarget(f"simulated:{times}", "bundled")
    print(f"{'budget seqs load':24}" + "".join(f"{metric + ' ms':>26}" for metric in METRICS))
    said: dict[str, list[float]] = {metric: [] for metric in METRICS}
    seen: dict[str, list[float]] = {metric: [] for metric in METRICS}
    spreads: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for config in (*(c for server in (*SERVERS, REPEATED) for c in chosen(server)), *drawn()):
        files = [file for repeat in range(REPEATS) if (file := config.file(folder, repeat)).is_file()]
        if not files:
            continue
        runs = [figures(Records.load(file)) for file in files]
        predicted = predict(target, config)
        cells = []
        for metric in METRICS:
            values = [run[metric] for run in runs]
            measured = statistics.median(values)
            said[metric].append(predicted[metric])
            seen[metric].append(measured)
            if len(values) > 1:
                spreads[metric].append((max(values) - min(values)) / measured)
            cells.append(f"{measured:8.1f} {predicted[metric]:8.1f} {predicted[metric] / measured - 1:+7.1%}")
        print(
            f"{config.budget:5} {config.seqs:4} {config.name:12}" + "".join(f"{cell:>26}" for cell in cells)
        )
    return verdict(said, seen, spreads)


def verdict(
    said: dict[str, list[float]], seen: dict[str, list[float]], spreads: dict[str, list[float]]
) -> bool:
    """The lines under the table."""
    met = True
    for metric in METRICS:
        errors = [abs(a / b - 1) for a, b in zip(said[metric], seen[metric], strict=True)]
        error, rho = statistics.median(errors), float(spearmanr(said[metric], seen[metric]).statistic)
        spread = statistics.median(spreads[metric]) if spreads[metric] else 0.0
        allowed = max(GOAL, SPREADS * spread)
        met &= error <= allowed and rho >= 0.95
        print(
            f"{metric}: median error {error:.1%} (goal {allowed:.1%}, repeats spread by {spread:.1%}), "
            f"worst {max(errors):.1%}, rho {rho:.3f}"
        )
    everything = [abs(a / b - 1) for m in METRICS for a, b in zip(said[m], seen[m], strict=True)]
    print(f"all: median error {statistics.median(everything):.1%} over {len(everything)} figures")
    return met


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("act", choices=("measure", "compare"))
    parser.add_argument("folder", type=Path, nargs="?", help="where runs are kept [a temporary one]")
    parser.add_argument("--quick", action="store_true", help="one server, once")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="fidelity-"))
    if options.act == "measure":
        measure(folder, options.quick)
    raise SystemExit(0 if compare(folder) else 1)


if __name__ == "__main__":
    main()
