"""Tuning problems with known answers: exhaustive tables of what every config of a space does under a load.

A table is computed by the simulator, once, and kept under ``~/.cache/vtune/tuner-tables``. A config is run
anew only if something about it can make a difference: if a limit (token budget, sequences, KV blocks) was
never reached in a run, every higher one gives the same run. Beside the table of a problem stand two more, of
what a prior would say: one good (coefficients within a tenth), one wrong (another card, or coefficients that
are off by 30 to 50 %).

What no plan knows is a region in which servers run out of memory: see :func:`runs_out_of_memory`.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.tuner_noise import SCALE, TABLE, TABLE_AXES, TABLE_SETTING
from engine.config import GIB
from engine.devices import DEVICES
from engine.step import StepOutput, StepPlan
from engine.step_times import StepTimes
from engine.virtual import SimulatedServer, Simulation
from loadgen.record import write_atomically
from loadgen.slo import Bound
from loadgen.targets.simulated import PREFIX, SimulatedTarget, gpu_defaults
from loadgen.workload import DEFAULT_VOCAB_SIZE, preset
from tuner.job import Job
from tuner.load import Load, span
from tuner.measure import Run, measure
from tuner.result import Measurement, Reading
from tuner.slo import Slo, parse_slo

CACHE = Path.home() / ".cache" / "vtune" / "tuner-tables"
TOKENS, SEQS, MEMORY = "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"
THRESHOLD, DRAFTS = "long_prefill_token_threshold", "num_speculative_tokens"
SPECULATION = "speculative_config"
REQUESTS = 160
"""Of the run behind an entry of a table, in an open loop."""
NEARLY = 0.9
"""Blocks are looked at between steps only: a pool that was never fuller is taken not to have bound."""

ALIKE = 0.02
"""Pools whose sizes differ by no more are taken for one."""

Key = tuple[int, int, float, int, int]
"""Tokens, sequences, utilization, threshold, drafts: what a simulated config is told apart by."""

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "8B": LLAMA_8B,
    "70B": {
        **LLAMA_8B,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
"""The shapes of Llama 3, with a context of 32,768 tokens."""


@dataclass(frozen=True)
class Entry:
    """What a config does. ``figures``: by metric; ``crash``: why it serves nobody, "" where it does."""

    figures: Mapping[str, float]
    crash: str = ""

    @property
    def measurement(self) -> Measurement:
        """Without any noise."""
        return Measurement({name: Reading(value) for name, value in self.figures.items()}, window=0.0)


@dataclass(frozen=True)
class Problem:
    """One search: a server, a load, an SLO, and the values that each knob may take."""

    name: str
    target: str
    model: str
    workload: str
    slo_text: str
    axes: Mapping[str, Sequence[int | float]]
    rate: float | None = None
    concurrency: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Flags that stay as they are."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The baseline, beside the device's own defaults."""
    scale: float | None = None
    """Of prompt lengths."""
    wrong: str = "coefficients"
    """How the wrong prior is wrong: "coefficients", or the target that it speaks of instead."""
    start_seconds: float = 45.0
    run_seconds: float = 40.0
    budget: float = 4500.0
    """Seconds for all of a search. A start and a run as above are what it affords some 45 times."""

    @property
    def slo(self) -> Slo:
        return parse_slo(self.slo_text)

    @property
    def baseline(self) -> dict[str, Any]:
        return {MEMORY: 0.92, THRESHOLD: 0, **gpu_defaults(self.target), **self.fixed, **self.defaults}

    @property
    def job(self) -> Job:
        """As ``vtune optimize`` would have it."""
        vary: dict[str, tuple[Any, ...] | None] = {
            name: tuple(values) for name, values in self.axes.items() if name != DRAFTS
        }
        if DRAFTS in self.axes:
            vary[SPECULATION] = None
        return Job(
            slo=self.slo_text,
            target=self.target,
            model=self.model,
            flags=self.baseline,
            workload=self.workload,
            rate=self.rate,
            concurrency=self.concurrency,
            budget=self.budget,
            run_seconds=self.run_seconds,
            fix=("all",),
            vary=vary,
        )

    def configs(self) -> Iterator[dict[str, Any]]:
        """Every config of the space, as flags."""
        for values in itertools.product(*self.axes.values()):
            yield self.flags(dict(zip(self.axes, values, strict=True)))

    def flags(self, chosen: Mapping[str, int | float]) -> dict[str, Any]:
        """``chosen`` by axis, as a server is started with it."""
        flags = {name: value for name, value in chosen.items() if name != DRAFTS}
        if drafts := chosen.get(DRAFTS, 0):
            flags[SPECULATION] = {"method": "ngram", DRAFTS: drafts}
        return {**self.baseline, **flags}

    def key(self, flags: Mapping[str, Any]) -> Key:
        """Two configs with the same key do the same. A threshold that no step reaches is as good as none."""
        speculation = flags.get(SPECULATION) or {}
        tokens, threshold = flags[TOKENS], flags.get(THRESHOLD) or 0
        drafts = speculation.get(DRAFTS, 0)
        return (
            tokens,
            flags[SEQS],
            flags.get(MEMORY, 0.92),
            threshold if threshold < tokens else 0,
            min(self.axes.get(DRAFTS, (0,)), key=lambda known: abs(known - drafts)),
        )


CPU = "simulated:cpu"
CPU_TIMES = StepTimes(
    host=4e-4, host_per_sequence=2e-5, launch=3e-3, weights=6.5e-3, per_token=5e-4, per_row=2e-4,
    per_context=2e-7, per_pair=4.5e-8, source="docs/benchmarks.md, a step of the engine",
)  # fmt: skip
"""Of the bundled model on two cores, so that its table is the same on every machine."""

GPU_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384),
    SEQS: (32, 64, 128, 256, 512, 1024),
    MEMORY: (0.8, 0.85, 0.9, 0.92, 0.95),
    THRESHOLD: (0, 512, 2048),
}
BATCH_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (512, 1024, 2048, 4096, 8192, 16_384),
    SEQS: (16, 24, 32, 48, 64, 80, 96, 128, 256, 1024),
    MEMORY: (0.8, 0.85, 0.9, 0.92, 0.95),
    THRESHOLD: (0, 1024),
}
SPECULATIVE_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (1024, 2048, 4096, 8192),
    SEQS: (8, 12, 16, 32, 128, 1024),
    MEMORY: (0.85, 0.9, 0.92, 0.95),
    DRAFTS: (0, 1, 2, 3, 4, 5),
}
CPU_AXES: Mapping[str, Sequence[int | float]] = {
    TOKENS: (64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
    SEQS: (4, 8, 16, 32, 64, 128),
    MEMORY: (0.8, 0.92, 0.95),
    THRESHOLD: (0, 64, 128, 256),
}
PROBLEMS = (
    Problem("chat itl 8B on H100", "simulated:h100", "8B", "chat", "itl", GPU_AXES, rate=24.0),
    Problem(
        "chat ttft 8B on H100 small start", "simulated:h100", "8B", "chat", "ttft", GPU_AXES, rate=26.0,
        defaults={TOKENS: 2048, SEQS: 64}, wrong="simulated:a100",
    ),
    Problem(
        "batch throughput 8B on L40S", "simulated:l40s", "8B", "batch", "throughput", BATCH_AXES,
        concurrency=112, wrong="simulated:h100", run_seconds=60.0, budget=6000.0,
    ),
    Problem(
        "mixed goodput 8B on H100", "simulated:h100", "8B", "mixed",
        "ttft_p95<2s,itl_p99<50ms", GPU_AXES, rate=14.0,
    ),
    Problem(
        "mixed itl 8B on L40S", "simulated:l40s", "8B", "mixed", "itl", GPU_AXES, rate=1.6,
        wrong="simulated:h100", run_seconds=100.0, budget=7500.0,
    ),
    Problem(
        "rag goodput 70B on 4 H100", "simulated:h100", "70B", "rag",
        "ttft_p95<4s,itl_p99<120ms", GPU_AXES, rate=1.2, fixed={"tensor_parallel_size": 4},
        start_seconds=90.0, run_seconds=120.0, budget=10_000.0,
    ),
    Problem(
        "chat throughput 70B on 8 H100 drafts", "simulated:h100", "70B", "chat", "throughput",
        SPECULATIVE_AXES, concurrency=24, fixed={"tensor_parallel_size": 8}, wrong="simulated:a100",
        start_seconds=90.0, run_seconds=20.0, budget=5000.0,
    ),
    Problem(
        "mixed itl small model on a CPU", CPU, "bundled", "mixed", "itl", CPU_AXES, rate=1.6,
        scale=0.1, defaults={TOKENS: 128, SEQS: 32}, start_seconds=4.0, run_seconds=20.0, budget=1200.0,
    ),
)  # fmt: skip
MEASURED = Problem(
    "mixed itl measured on the bundled engine", "bundled", "bundled", "mixed", "itl", TABLE_AXES,
    rate=TABLE_SETTING.rate, scale=SCALE, defaults={TOKENS: 256, SEQS: 64},
    start_seconds=4.7, run_seconds=8.0, budget=500.0,
)  # fmt: skip
"""Its table was measured, a run a config (``tuner_noise.py``); its priors are the simulator's."""


def runs_out_of_memory(problem: Problem, key: Key) -> bool:
    """What a server takes beside the plan's, against what gpu_memory_utilization leaves.

    Workspaces of kernels grow with the tokens of a step, the sampler's with its sequences, and memory
    fragments; the figures are of the size that users report.
    """
    tokens, seqs, memory, _, drafts = key
    if problem is MEASURED:
        return False
    if problem.target == CPU:
        return 20e6 + 40e3 * tokens + 0.3e6 * seqs > (1 - memory) * 2 * GIB
    device = DEVICES[problem.target.removeprefix(PREFIX)]
    hidden = 1.5 * GIB + 250e3 * tokens + 2e6 * seqs * (1 + 0.25 * drafts)
    return hidden > (1 - memory) * device.memory_bytes


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

    def feasible(self, flags: Mapping[str, Any]) -> bool:
        entry = self.entry(flags)
        if entry.crash:
            return False
        return all(v <= 0 for v in entry.measurement.violations(self.bounds).values())

    def value(self, flags: Mapping[str, Any]) -> float:
        """Of the objective; nan for a config that does not serve."""
        return self.entry(flags).figures.get(self.problem.slo.objective.name, math.nan)

    @cached_property
    def best(self) -> float:
        """The objective's best value among the feasible configs."""
        values = [self.value(flags) for flags in self.problem.configs() if self.feasible(flags)]
        return (min if self.problem.slo.objective.direction == "minimize" else max)(values)

    def regret(self, flags: Mapping[str, Any] | None) -> float:
        """How much worse than the best, as a share of it; 1 for what is worse than that, or not feasible."""
        if flags is None or not self.feasible(flags):
            return 1.0
        ratio = self.value(flags) / self.best
        return min(1.0, ratio - 1 if self.problem.slo.objective.direction == "minimize" else 1 - ratio)


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

    def stands_for(self, tokens: int, seqs: int, blocks: int) -> bool:
        peaks = self.peaks
        room = min(blocks, self.blocks) * NEARLY
        return (
            (tokens == self.tokens or peaks.tokens < min(tokens, self.tokens))
            and (seqs == self.seqs or peaks.seqs < min(seqs, self.seqs))
            and (abs(blocks / self.blocks - 1) <= ALIKE or peaks.used < room)
        )


class Builder:
    """Makes a problem's table; ``change`` alters the step times, for a prior that is wrong."""

    def __init__(
        self, problem: Problem, *, target: str = "", seed: int = 0, change: Callable[[StepTimes], StepTimes]
    ) -> None:
        self.problem = problem
        self._target = SimulatedTarget(_device(target or problem.target), _model_file(problem.model))
        self._change, self._slo, self._seed = change, problem.slo, seed
        self._done: dict[tuple[int, int], list[_Done]] = {}
        self.runs = 0

    def table(self) -> Table:
        """From the highest limits down: what never binds stands for all below that would not either."""
        entries: dict[Key, Entry] = {}
        for flags in sorted(self.problem.configs(), key=self.problem.key, reverse=True):
            entries.setdefault(self.problem.key(flags), self._entry(flags))
        baseline = self.problem.baseline
        entries.setdefault(self.problem.key(baseline), self._entry(baseline))
        return Table(self.problem, entries)

    def _entry(self, flags: Mapping[str, Any]) -> Entry:
        key = self.problem.key(flags)
        tokens, seqs, _, threshold, drafts = key
        given = {**flags, THRESHOLD: threshold}
        try:
            simulation = self._target.simulation(given)
            changed = replace(simulation, times=self._change(simulation.times))
            server = SimulatedServer(changed)
        except ValueError as error:
            return Entry({}, f"does not start: {error}")
        plan = server.core.memory_plan
        known = self._done.setdefault((threshold, drafts), [])
        done = next((d for d in known if d.stands_for(tokens, seqs, plan.num_blocks)), None)
        if done is None:
            peaks = _Peaks()
            done = _Done(tokens, seqs, plan.num_blocks, peaks, self._run(changed, given, peaks))
            known.append(done)
        return Entry(done.figures)

    def _run(self, simulation: Simulation, flags: Mapping[str, Any], peaks: _Peaks) -> dict[str, float]:
        self.runs += 1
        target = _Changed(self._target, simulation)
        with target.open(flags) as server:
            for door in server._doors:
                peaks.watch(door.server)
            assert server.max_model_len is not None
            schedule = self._load(server.max_model_len).confirmation(self._seed)
            run = Run(server.run(schedule), span(schedule))
        return {name: reading.value for name, reading in measure([run], self._slo).readings.items()}

    def _load(self, context: int) -> Load:
        problem = self.problem
        workload = preset(
            problem.workload, max_model_len=context, vocab_size=DEFAULT_VOCAB_SIZE, scale=problem.scale
        )
        seconds = REQUESTS / problem.rate if problem.rate else problem.run_seconds
        return Load(workload, self._seed, seconds, problem.rate, problem.concurrency)


class _Changed(SimulatedTarget):
    """A target whose simulations are given."""

    def __init__(self, target: SimulatedTarget, simulation: Simulation) -> None:
        self.__dict__ |= target.__dict__
        self._given = simulation

    def simulation(self, config: Mapping[str, Any]) -> Simulation:
        return self._given


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
    if name not in MODELS:
        return name
    path = CACHE / name / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, [json.dumps(MODELS[name])])
    return str(path)


COEFFICIENTS = ("host", "host_per_sequence", "launch", "weights", "per_token", "per_row", "per_context")


def as_it_is(times: StepTimes) -> StepTimes:
    return times


def scaled(seed: str, low: float, high: float) -> Callable[[StepTimes], StepTimes]:
    """Every coefficient off by a factor of its own: up or down by ``low`` to ``high``."""

    def change(times: StepTimes) -> StepTimes:
        rng = random.Random(seed)
        factors = {name: 1 + rng.choice((-1, 1)) * rng.uniform(low, high) for name in COEFFICIENTS}
        return replace(times, **{name: getattr(times, name) * factor for name, factor in factors.items()})

    return change


def builder(problem: Problem, kind: str) -> Builder:
    """``kind``: truth, good, wrong. Both priors see other requests than the truth does."""
    target = CPU if problem is MEASURED else problem.target
    if kind == "truth":
        return Builder(problem, target=target, change=as_it_is)
    if kind == "good":
        return Builder(problem, target=target, seed=7, change=scaled(problem.name, 0.0, 0.1))
    if problem.wrong == "coefficients":
        return Builder(problem, target=target, seed=7, change=scaled(problem.name, 0.3, 0.5))
    return Builder(problem, target=problem.wrong, seed=7, change=as_it_is)


def table(problem: Problem, kind: str = "truth", cache: Path = CACHE) -> Table:
    """From the cache, or made and put there; what was measured, from its file."""
    if problem is MEASURED and kind == "truth":
        return read_measured(problem, json.loads(TABLE.read_text())["rows"])
    slug = "-".join("".join(c if c.isalnum() else " " for c in problem.name).split())
    path = cache / f"{slug}-{kind}.json"
    if path.is_file():
        return read_table(problem, path.read_text())
    made = builder(problem, kind)
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
        rows.append([*key, figures.setdefault(text, len(figures)), entry.crash])
    return json.dumps({"figures": [json.loads(text) for text in figures], "rows": rows})


def read_table(problem: Problem, text: str) -> Table:
    data = json.loads(text)
    rows = {
        (row[0], row[1], row[2], row[3], row[4]): Entry(data["figures"][row[5]], row[6])
        for row in data["rows"]
    }
    return Table(problem, rows)


def read_measured(problem: Problem, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of the file that ``tuner_noise`` writes. Over 20 requests the trend of a backlog says nothing: none is
    taken to be left."""
    entries = {}
    for row in rows:
        figures = {name: reading[0] for name, reading in row["whole"].items() if reading[0] is not None}
        entries[problem.key({**problem.baseline, **row["config"]})] = Entry({**figures, "backlog": 0.0})
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
