"""Problems with known answers: exhaustive tables of what every config of a space does under a load.

A table is computed by the simulator, once, and kept under ``~/.cache/vtune/tuner-tables``. A config is run
anew only if something about it can make a difference: if a limit (token budget, sequences, KV blocks) was
never reached in a run, every higher one gives the same run. Beside the table of a problem stand two more, of
what a prior would say: one good (coefficients within a tenth), one wrong (another card, or coefficients that
are off by 30 to 50 %).
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.engine.shapes import SHAPES, shape
from benchmarks.tuner.noise import TABLE
from benchmarks.tuner.problems import CPU, MEASURED, THRESHOLD, Key, Problem, runs_out_of_memory
from engine.errors import ConfigError
from engine.sim.server import SimulatedServer, Simulation
from engine.sim.step_times import StepTimes
from engine.step import StepOutput, StepPlan
from loadgen.plan.workload import DEFAULT_VOCAB_SIZE, preset
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError
from servers.files import write_atomically
from servers.slo.bounds import COUNTS, Bound
from tuner.runs.load import GeneratedLoad, load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.result import Measurement, Reading
from tuner.runs.scrape import ServerFigures, read_figures

CACHE = Path.home() / ".cache" / "vtune" / "tuner-tables"
UNTOLD = ServerFigures()
REQUESTS = 160
"""Of the run behind an entry of a table, in an open loop."""
NEARLY = 0.9
"""Blocks are looked at between steps only: a pool that was never fuller is taken not to have bound."""

EDGE = 0.02
"""A config that holds a bound by less misses it on about every other fresh run: to be as good as such a one
is not asked of any method."""
ALIKE = 0.02
"""Pools whose sizes differ by no more are taken for one."""

CONTEXT = 32_768
"""Of the models, in tokens."""
CPU_TIMES = StepTimes(
    host=4e-4, host_per_sequence=2e-5, launch=3e-3, weights=6.5e-3, per_token=5e-4, per_row=2e-4,
    per_context=2e-7, per_pair=4.5e-8, source="docs/benchmarks.md, a step of the engine",
)  # fmt: skip
"""Of the bundled model on two cores, so that its table is the same on every machine."""


@dataclass(frozen=True)
class Entry:
    """What a config does. ``figures``: by metric; ``crash``: why it does not serve, "" where it does."""

    figures: Mapping[str, float]
    crash: str = ""
    server: ServerFigures = UNTOLD
    """What the server's own metrics would have told; nothing where that was not kept."""

    @property
    def measurement(self) -> Measurement:
        """Without any noise."""
        return Measurement({name: Reading(value) for name, value in self.figures.items()}, window=0.0)


@dataclass(frozen=True)
class Table:
    """What every config of a problem does."""

    problem: Problem
    entries: Mapping[Key, Entry]

    def entry(self, flags: Mapping[str, Any]) -> Entry:
        key = self.problem.key(flags)
        if runs_out_of_memory(self.problem, key):
            return Entry({}, "out of memory")
        return self.entries[key]

    @cached_property
    def bounds(self) -> tuple[Bound, ...]:
        """The SLO's, the relative ones of the baseline as it is."""
        return self.problem.slo.resolve(self.entry(self.problem.baseline).measurement.value)

    def feasible(self, flags: Mapping[str, Any], margin: float = 0.0) -> bool:
        """``margin``: by how much every bound that is not 0 is to be held."""
        entry = self.entry(flags)
        if entry.crash:
            return False
        violations = entry.measurement.violations(self.bounds)
        return all(v <= (0 if name in COUNTS else -margin) for name, v in violations.items())

    def value(self, flags: Mapping[str, Any]) -> float:
        """Of the objective; nan for a config that does not serve."""
        return self.entry(flags).figures.get(self.problem.slo.objective.name, math.nan)

    @cached_property
    def best(self) -> float:
        """The objective's best value among the configs that hold their bounds by EDGE."""
        values = [self.value(flags) for flags in self.problem.configs() if self.feasible(flags, EDGE)]
        return (min if self.problem.slo.objective.direction == "minimize" else max)(values)

    def regret(self, flags: Mapping[str, Any] | None) -> float:
        """How much worse than the best, as a share of it; 1 for what is worse than that, or not feasible."""
        if flags is None or not self.feasible(flags):
            return 1.0
        ratio = self.value(flags) / self.best
        return min(
            1.0, max(0.0, ratio - 1 if self.problem.slo.objective.direction == "minimize" else 1 - ratio)
        )


@dataclass
class _Peaks:
    """How close a run came to its limits."""

    tokens: int = 0
    seqs: int = 0
    used: int = 0

    def watch(self, server: SimulatedServer) -> None:
        core = server.core
        step, blocks = core.step, core.memory_plan.num_blocks

        def watched() -> tuple[StepPlan, StepOutput]:
            plan, output = step()
            self.tokens = max(self.tokens, plan.num_scheduled_tokens)
            self.seqs = max(self.seqs, plan.num_running)
            self.used = max(self.used, blocks - plan.free_blocks)
            return plan, output

        core.step = watched  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Done:
    """A run that others may be equal to."""

    tokens: int
    seqs: int
    blocks: int
    peaks: _Peaks
    figures: Mapping[str, float]
    server: ServerFigures

    def stands_for(self, tokens: int, seqs: int, blocks: int) -> bool:
        peaks = self.peaks
        room = min(blocks, self.blocks) * NEARLY
        return (
            (tokens == self.tokens or peaks.tokens < min(tokens, self.tokens))
            and (seqs == self.seqs or peaks.seqs < min(seqs, self.seqs))
            and (abs(blocks / self.blocks - 1) <= ALIKE or peaks.used < room)
        )


class Builder:
    """Makes a problem's table. ``seed``: of the load; ``change`` alters the step times."""

    def __init__(
        self,
        problem: Problem,
        target: SimulatedTarget,
        *,
        seed: int = 0,
        change: Callable[[StepTimes], StepTimes] = lambda times: times,
    ) -> None:
        self.problem, self._target = problem, target
        self._change, self._slo, self._seed = change, problem.slo, seed
        self._done: dict[tuple[int, int], list[_Done]] = {}
        self.runs = 0

    def table(self) -> Table:
        """From the highest limits down: what never binds stands for all below that would not either."""
        entries: dict[Key, Entry] = {}
        for flags in sorted(self.problem.configs(), key=self.problem.key, reverse=True):
            entries.setdefault(self.problem.key(flags), self.entry(flags))
        baseline = self.problem.baseline
        entries.setdefault(self.problem.key(baseline), self.entry(baseline))
        return Table(self.problem, entries)

    def entry(self, flags: Mapping[str, Any]) -> Entry:
        """Of one config, which may be a run anew."""
        key = self.problem.key(flags)
        tokens, seqs, _, threshold, drafts = key
        given = {**flags, THRESHOLD: threshold}
        try:
            simulation = self._target.simulation(given)
            changed = replace(simulation, times=self._change(simulation.times))
            server = SimulatedServer(changed)
        except (SimulatedTargetError, ConfigError) as error:
            return Entry({}, f"does not start: {error}")
        plan = server.core.memory_plan
        known = self._done.setdefault((threshold, drafts), [])
        done = next((d for d in known if d.stands_for(tokens, seqs, plan.num_blocks)), None)
        if done is None:
            peaks = _Peaks()
            done = _Done(tokens, seqs, plan.num_blocks, peaks, *self._run(changed, given, peaks))
            known.append(done)
        usage = done.peaks.used / plan.num_blocks
        return Entry(done.figures, server=replace(done.server, peak_kv_usage=float(f"{usage:.3g}")))

    def _run(
        self, simulation: Simulation, flags: Mapping[str, Any], peaks: _Peaks
    ) -> tuple[dict[str, float], ServerFigures]:
        self.runs += 1
        name = self._target.name
        with SimulatedTarget(name, name, simulate=lambda config: simulation).open(flags) as server:
            for replica in server.servers:
                peaks.watch(replica.engine)
            assert server.max_model_len is not None
            schedule = self.load(server.max_model_len).confirmation(self._seed)
            run = Run(server.run(schedule), load_seconds(schedule))
        told = replace(read_figures(run.records.scrapes), kv_tokens=None, peak_running=peaks.seqs)
        return {name: reading.value for name, reading in measure([run], self._slo).readings.items()}, told

    def load(self, context: int) -> GeneratedLoad:
        problem = self.problem
        workload = preset(
            problem.workload, max_model_len=context, vocab_size=DEFAULT_VOCAB_SIZE, scale=problem.scale
        )
        seconds = REQUESTS / problem.rate if problem.rate else problem.run_seconds
        return GeneratedLoad(workload, self._seed, seconds, problem.rate, problem.concurrency)


def simulated(device: str, model: str) -> SimulatedTarget:
    """By the names that problems have for them."""
    return SimulatedTarget(_device(device), _model_file(model))


def server_of(problem: Problem) -> SimulatedTarget:
    """The problem's own; of the one that was measured, what the simulator takes for it."""
    return simulated(CPU if problem is MEASURED else problem.target, problem.model)


def _device(name: str) -> str:
    """The target by a name that SimulatedTarget knows."""
    if name != CPU:
        return name
    path = CACHE / "cpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [CPU_TIMES.to_json()])
    return f"simulated:{path}"


def _model_file(name: str) -> str:
    """The path of a config.json with the model's shape; "bundled" is itself."""
    if name not in SHAPES:
        return name
    path = CACHE / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(shape(name, CONTEXT))])
    return str(path)


COEFFICIENTS = ("host", "host_per_sequence", "launch", "weights", "per_token", "per_row", "per_context")


def scaled(seed: str, low: float, high: float) -> Callable[[StepTimes], StepTimes]:
    """Every coefficient off by a factor of its own: up or down by ``low`` to ``high``."""

    def change(times: StepTimes) -> StepTimes:
        rng = random.Random(seed)
        factors = {name: 1 + rng.choice((-1, 1)) * rng.uniform(low, high) for name in COEFFICIENTS}
        return replace(times, **{name: getattr(times, name) * factor for name, factor in factors.items()})

    return change


def builder(problem: Problem, kind: str) -> Builder:
    """``kind``: truth, good, wrong. Both priors see other requests than the truth does."""
    if kind == "truth":
        return Builder(problem, server_of(problem))
    if kind == "good":
        return Builder(problem, server_of(problem), seed=7, change=scaled(problem.name, 0.0, 0.1))
    if problem.wrong == "coefficients":
        return Builder(problem, server_of(problem), seed=7, change=scaled(problem.name, 0.3, 0.5))
    return Builder(problem, simulated(problem.wrong, problem.model), seed=7)


def table(problem: Problem, kind: str = "truth", cache: Path = CACHE) -> Table:
    """From the cache, or made and put there; what was measured, from its file."""
    if problem is MEASURED and kind == "truth":
        return read_measured(problem, json.loads(TABLE.read_text())["rows"])
    return cached(problem, kind, lambda: builder(problem, kind), cache)


def cached(problem: Problem, kind: str, make: Callable[[], Builder], cache: Path) -> Table:
    """From the cache, or by the builder that ``make`` makes, and put there."""
    slug = "-".join("".join(c if c.isalnum() else " " for c in problem.name).split())
    path = cache / f"{slug}-{kind}.json"
    if path.is_file():
        return read_table(problem, path.read_text())
    made = make()
    found = made.table()
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [to_json(found)])
    print(f"{path.name}: {len(found.entries)} configs by {made.runs} runs", flush=True)
    return found


def to_json(made: Table) -> str:
    """Equal figures are written once."""
    figures: dict[str, int] = {}
    rows = []
    for key, entry in made.entries.items():
        text = json.dumps({name: float(f"{value:.5g}") for name, value in entry.figures.items()})
        server = [entry.server.peak_running, entry.server.preemptions, entry.server.peak_kv_usage]
        server.append(entry.server.prefix_hits)
        rows.append([*key, figures.setdefault(text, len(figures)), entry.crash, *server])
    return json.dumps({"figures": [json.loads(text) for text in figures], "rows": rows})


def read_table(problem: Problem, text: str) -> Table:
    data = json.loads(text)
    rows = {
        (row[0], row[1], row[2], row[3], row[4]): Entry(
            data["figures"][row[5]], row[6], ServerFigures(None, *row[7:])
        )
        for row in data["rows"]
    }
    return Table(problem, rows)


def read_measured(problem: Problem, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of the file that ``tuner_noise`` writes."""
    entries = {}
    for row in rows:
        figures = {name: reading[0] for name, reading in row["whole"].items() if reading[0] is not None}
        entries[problem.key({**problem.baseline, **row["config"]})] = Entry(figures)
    return Table(problem, entries)


def describe(made: Table) -> str:
    """How hard the problem is, in a line."""
    configs = list(made.problem.configs())
    crashes = sum(bool(made.entry(flags).crash) for flags in configs)
    feasible = sum(made.feasible(flags) for flags in configs)
    near = sum(made.regret(flags) <= 0.05 for flags in configs)
    share = 100 / len(configs)
    return (
        f"{made.problem.name}: {len(configs)} configs, {crashes * share:.0f} % crash, "
        f"{feasible * share:.0f} % feasible, {near * share:.1f} % within 5 % of the best"
    )
