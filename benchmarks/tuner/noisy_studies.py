"""Studies of the tuner on simulated servers with noise; any mechanism of the search can be switched off."""

from __future__ import annotations

import math
import random
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import optuna

from benchmarks.tuner.problems import SEQS, TOKENS
from engine.sim.server import Simulation
from engine.sim.step_times import StepLoad, StepTimes
from loadgen.plan.workload import DEFAULT_VOCAB_SIZE, preset
from loadgen.targets.simulated import OpenSimulation, SimulatedTarget
from servers.flags.words import render
from servers.kinds import KINDS
from servers.slo.objective import Slo, parse_slo
from tuner.job.job import Job
from tuner.job.options import Options
from tuner.runs.interrupts import Interrupts
from tuner.runs.load import GeneratedLoad
from tuner.search.prior import make_simulator
from tuner.session.new_job import requested_job
from tuner.study.observer import Observer
from tuner.study.optimize import Optimizer
from tuner.study.trial import Bench

LUCK = 0.05
"""Standard deviation of the logarithm of a load's luck."""
TRUTH_SEED = 90_000
"""Of the requests that judge; studies have seeds from 1 on."""
PLAYBOOKS = Path(__file__).parents[2] / "playbooks"
Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """A server, a load and an SLO."""

    name: str
    target: str
    model: str
    workload: str
    slo_text: str
    rate: float
    """Requests/s: about 70 % of what the server can do."""
    scale: float = 1.0
    """Of prompt lengths."""
    context: int = 32_768
    flags: Flags = field(default_factory=dict)
    """The baseline's."""
    budget: str = "30m"
    start_seconds: float = 30.0

    @property
    def slo(self) -> Slo:
        return parse_slo(self.slo_text)

    def job(self, seed: int, prior: str = "auto") -> Job:
        """As the command has it."""
        options = Options(
            slo=self.slo_text, target=self.target, model=self.model,
            flags=shlex.join(render(self.flags)) or None,
            workload=self.workload, scale=self.scale, rate=self.rate, budget=self.budget, seed=seed,
            prior=prior,
        )  # fmt: skip
        return requested_job(options).job

    def load(self, seconds: float) -> GeneratedLoad:
        workload = preset(
            self.workload, max_model_len=self.context, vocab_size=DEFAULT_VOCAB_SIZE, scale=self.scale
        )
        return GeneratedLoad(workload, TRUTH_SEED, seconds, self.rate)


def two_cores(workload: str, slo: str, rate: float, scale: float, flags: Flags, budget: str) -> Cell:
    return Cell(
        f"two cores, {workload} {'goodput' if '<' in slo else slo}",
        f"simulated:{PLAYBOOKS / 'times-two-cores.json'}", str(PLAYBOOKS / "shape-135m.json"),
        workload, slo, rate, scale, 8192, flags, budget, 5.0,
    )  # fmt: skip


def gpu(
    device: str, workload: str, slo: str, rate: float, flags: Flags | None = None, note: str = ""
) -> Cell:
    name = f"{device}, {workload} {'goodput' if '<' in slo else slo}{note}"
    model = str(PLAYBOOKS / "shape-8b.json")
    return Cell(name, f"simulated:{device}", model, workload, slo, rate, flags=flags or {})


CELLS = (
    two_cores("mixed", "itl", 1.7, 0.122, {TOKENS: 512, SEQS: 16}, "15m"),
    two_cores("chat", "ttft", 2.0, 0.25, {SEQS: 6}, "15m"),
    two_cores("rag", "ttft_p95<9s,itl_p99<600ms", 0.28, 0.25, {SEQS: 1}, "40m"),
    gpu("h100", "mixed", "itl", 8.0),
    gpu("h100", "chat", "ttft", 20.0, {SEQS: 32}),
    gpu("h100", "rag", "ttft_p95<2s,itl_p99<300ms", 2.2, {SEQS: 8}),
    gpu("l40s", "mixed", "itl", 1.9),
    gpu("l40s", "chat", "ttft", 4.8, {SEQS: 16}),
    gpu("l40s", "rag", "ttft_p95<4s,itl_p99<100ms", 0.66),
    gpu("h100", "chat", "ttft", 20.0, note=", its defaults"),
)


class Luck:
    """Of the load that runs: a factor on all times of its steps."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self.draw()

    def draw(self) -> None:
        self.factor = math.exp(self._rng.gauss(0, LUCK))


@dataclass(frozen=True)
class LuckyTimes(StepTimes):
    luck: Luck | None = None

    def host_seconds(self, load: StepLoad) -> float:
        return super().host_seconds(load) * (self.luck.factor if self.luck else 1)

    def device_seconds(self, load: StepLoad) -> float:
        return super().device_seconds(load) * (self.luck.factor if self.luck else 1)


class LuckyTarget(SimulatedTarget):
    """Starts take time, and every load has its own luck."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.luck, self._start_seconds = Luck(f"{cell.name}/{seed}"), cell.start_seconds
        super().__init__(cell.target, cell.model, seed=seed)

    def simulation(self, config: Flags) -> Simulation:
        plain = super().simulation(config)
        return replace(plain, times=LuckyTimes(**vars(plain.times), luck=self.luck))

    def passed(self, seconds: float) -> None:
        super().passed(seconds)
        self.luck.draw()

    @contextmanager
    def open(self, config: Flags) -> Iterator[OpenSimulation]:
        self.passed(self._start_seconds)
        with super().open(config) as server:
            server.start_seconds = self._start_seconds
            yield server


@dataclass(frozen=True)
class Study:
    """What one study came to. ``recommended``: None where it recommends nothing."""

    seed: int
    kind: str
    sentence: str
    recommended: Flags | None
    moves: Mapping[str, tuple[Any, Any]]
    """Of what is recommended: flag -> (the baseline's, the new)."""
    measured: tuple[Flags, ...]
    trials: int
    seconds: float


def search(cell: Cell, seed: int, without: str = "") -> Study:
    """One study, by the tuner's own code. ``without``: a name in MECHANISMS."""
    prior = "sketch" if without and without != "prior" else "auto"
    job, target = cell.job(seed, prior), LuckyTarget(cell, seed)
    record = optuna.create_study(direction=cell.slo.objective.direction)
    with tempfile.TemporaryDirectory() as out, ExitStack() as patches:
        for name, instead in MECHANISMS.get(without, {}).items():
            patches.enter_context(patch(name, instead))
        bench = Bench(target, Observer(), Interrupts(), Path(out), KINDS[job.server])
        optimizer = Optimizer(job, bench, record)
        optimizer.simulator = make_simulator(job.prior, job.target, job.model, fitted=optimizer.fit_simulator)
        outcome = optimizer.run()
    best = outcome.best if outcome.kind == "better" else None
    results = [r for r in optimizer.study.results if r.launched]
    return Study(
        seed,
        outcome.kind,
        outcome.sentence,
        optimizer.flags(best.config) if best else None,
        dict(optimizer.study.space.changes(best.config)) if best else {},
        tuple(optimizer.flags(r.config) for r in results),
        len(results) - 1,
        optimizer.clock.spent,
    )


def nothing(*args: Any, **named: Any) -> Any:
    return ()


NO, EMPTY = (lambda *args, **named: False), ""
MECHANISMS: Mapping[str, Mapping[str, Any]] = {
    "nothing": {},
    "hints": {"tuner.study.first_trials.Hints.of": lambda *args: None},
    "prescriptions": {"tuner.study.first_trials.prescribed": nothing},
    "starting points": {"tuner.study.first_trials.FirstTrials._starting_points": nothing},
    "prior": {},
    "crash region": {
        "tuner.search.model.Crashes.forbidden": lambda self, codes: np.zeros(len(codes), dtype=bool),
        "tuner.search.model.Crashes.chance": lambda self, codes: np.ones(len(codes)),
    },
    "inactive knobs": {
        "tuner.search.model.inactive": lambda space, told, codes: np.zeros(len(codes), dtype=bool)
    },
    "price of a change": {"tuner.search.model.LOG_GAIN_PER_CHANGE": 0.0},
    "early stop": {"tuner.study.trial.reason_to_stop": lambda *args: EMPTY},
    "repeats": {"tuner.study.final_trials.FinalTrials._close": NO},
    "simpler": {"tuner.study.final_trials.FinalTrials._simpler": NO},
    "next best": {"tuner.study.candidate_confirmation.MAX_CONFIRMED": 1},
}
"""What each is replaced with while it is switched off. All of these studies have a prior, a sketch, but those
without one."""
