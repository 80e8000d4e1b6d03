"""A server drawn from outside: what its steps take, by what its own baseline measured.

Of a server on an unknown device a study knows, once the baseline is measured, what a lone request takes,
which gaps between tokens and times to the first one came of a load that is known request by request, and how
many tokens the KV pool holds. A few coefficients of a step are fitted to that: the baseline is simulated,
under the very load that it had, until its simulated figures are the measured ones.

Five are free. A step takes ``launch`` whatever is in it, and for its linear layers the longer of two: all
weights are read (``weights``), or every token is computed (``per_token``); it reads the keys and values of
every context (``per_context``); and a request takes ``entry`` on its way to the engine. One config cannot
tell them apart for certain, so each begins where transformers have it, and goes from there as far as the
figures draw it:

- of the step of a lone request LAUNCH is not for weights: kernels wait for each other and for the host;
- keys and values are read as fast as weights, so that their sizes, which a start log or the model's config
  tells, are in proportion to their seconds; where neither does, the whole pool is taken for POOL times as
  large as the weights;
- of attention the config says how its FLOP compare with those of the linear layers; without one it is 4 d a
  query-key pair and layer against 24 d² a token, where d follows from the size of the weights or is WIDTH;
- what a request adds to a step beside its token (logits, sampling, the host) is ROW of a prompt's token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Self

import numpy as np
from scipy.optimize import least_squares

from loadgen.plan.workload import Schedule
from loadgen.target import TargetFailed
from loadgen.targets.model_shape import Shape
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError, sketched_target
from servers.memory_plan import MemoryPlan
from servers.slo.bounds import LATENCIES, RATES, family_of, name_of
from servers.slo.objective import Slo
from tuner.runs.load import span
from tuner.runs.measure import Run, measure
from tuner.runs.profiling import LONE_PROMPT, Survey, time_alone
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.search.gp import Array
from tuner.space.config import Config

NAME = "sketch of the baseline"
HEEDED = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduling_policy",
)
"""Flags of which the scheduler alone says what they do. ``gpu_memory_utilization`` is in the pool's size.
What others do to a step nobody has measured: configs that differ in them are the same to a sketch."""
BLOCK = 16
LAUNCH, ENTRY = 0.3, 0.1
"""Of a lone request's step, to begin with."""
POOL = 2.0
ROW = 0.3
WIDTH, LAYERS = 4096, 1 / 128
"""Of a model of which nothing is known; and how many layers models have for their width."""
BUSY = 0.7
"""Of the most requests that ran at once, how many usually do."""
WANDER = {"launch": 1.5, "weights": 0.5, "per_token": 0.5, "per_context": 1.0, "entry": 1.0}
"""How far a coefficient may be from where it begins: a standard deviation, in logarithm."""
REACH = 3.0
"""How far at most, in those deviations."""
HELD = {*LATENCIES, "throughput"} - {"inter_chunk"}
"""Families of figures that are to be reproduced; gaps of chunks are those of tokens."""
EXACT, ROUGH = 0.03, 0.05
"""By how much (in logarithm) a median or a rate, and any other figure, may be off and is reproduced."""
MOVE, ROUNDS = 0.1, 8
"""By how much (in logarithm) a coefficient is moved to see what it does; and how often all are at most."""
FAITHFUL = 0.15
"""How close (in logarithm) a sketch must come to the SLO's figures for a confirmation to be rehearsed on it:
it knows nothing of what makes runs differ, so that its intervals are too narrow for more."""
ENDLESS = 10_000_000
"""Tokens of a KV pool that no load of a study fills: a larger one changes nothing, but takes long to make."""
FAR = 3.0
"""Errors (in logarithm) beyond are all alike."""
SPEED, ALONE = "prefill speed alone", "itl alone"


class NoSketch(Exception):
    """What is missing for one."""


@dataclass(frozen=True)
class Sketch:
    """``coefficients``: seconds, by the names of ``engine.sim.step_times.StepTimes``."""

    coefficients: Mapping[str, float]
    baseline: Config
    """Effective (see tuner.space.space)."""
    max_model_len: int
    kv_tokens: int
    """Of the baseline's pool."""
    memory: MemoryPlan | None = None
    """How the pool goes with ``gpu_memory_utilization``; None: all configs are taken to have the same."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Of the baseline's figures: simulated over measured, in logarithm."""

    @cached_property
    def target(self) -> SimulatedTarget:
        """What simulates configs."""
        times = {**self.coefficients, "source": self.describe()}
        return sketched_target(NAME, times, self.max_model_len, self._flags)

    def describe(self) -> str:
        ms = {name: f"{value * 1e3:.3g} ms" for name, value in self.coefficients.items()}
        error = self.errors.get("itl_p99", math.nan)
        off = "" if math.isnan(error) else f"; its own ITL P99 is off by {abs(math.expm1(error)):.0%}"
        pool = "" if self.memory else "; all configs with the same KV pool"
        return (
            f"{ms['per_token']} a prompt token, {ms['launch']} a step and at least {ms['weights']} for its "
            f"tokens, {ms['per_row']} a request{off}{pool}"
        )

    def faithful(self, slo: Slo) -> bool:
        """Whether it misses no figure of the SLO by more than FAITHFUL in the baseline itself."""
        names = (name_of(metric, cls) for metric, cls in slo.metrics)
        return all(abs(self.errors.get(name, 0.0)) <= FAITHFUL for name in names)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "memory": MemoryPlan(**data["memory"]) if data["memory"] else None})

    def _flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of a config, what is simulated. Flags that it does not name are the baseline's."""
        whole = {**self.baseline, **config}
        given = {name: whole[name] for name in HEEDED if whole.get(name) is not None}
        given["max_num_seqs"] = min(given["max_num_seqs"], given["max_num_batched_tokens"])
        return {**given, "num_gpu_blocks_override": 1 + self._pool(whole) // BLOCK}

    def _pool(self, config: Config) -> int:
        """Tokens."""
        more = 0 if self.memory is None else self.memory.tokens_more(config, self.baseline)
        return min(max(0, self.kv_tokens + more), ENDLESS)


def draw(
    survey: Survey,
    baseline: TrialResult,
    schedules: Sequence[Schedule],
    slo: Slo,
    shape: Shape | None = None,
) -> Sketch:
    """``schedules``: what the baseline was loaded with. ``shape``: the model's, where it is known.

    Some forty simulations of the baseline. Raises NoSketch.
    """
    measured = baseline.measurement
    if baseline.status != "measured" or measured is None:
        raise NoSketch("the baseline could not be measured")
    if not measured.value("itl_p50") > 0:
        raise NoSketch("the baseline has no ITL")
    if not 0 < survey.prefill_speed < math.inf:
        raise NoSketch("no lone prefill could be timed")
    fit = _Fit(survey, baseline, measured, schedules, slo, shape)
    try:
        found = fit.sketch(_fitted(fit))
        return replace(found, errors=fit.errors(found))
    except TargetFailed as failure:
        raise NoSketch(f"the baseline's own config cannot be simulated: {failure.detail}") from None


def _fitted(fit: _Fit) -> dict[str, float]:
    """The coefficients that are most probable, given where they begin and how far they wander."""
    begin = fit.begin()
    start, widths = np.log([*begin.values()]), np.array([WANDER[name] for name in begin])
    known: dict[bytes, Array] = {}

    def coefficients(x: Array) -> dict[str, float]:
        return dict(zip(begin, np.exp(x).tolist(), strict=True))

    def residuals(x: Array) -> Array:
        key = x.tobytes()
        if key not in known:
            known[key] = np.array([*fit.residuals(fit.sketch(coefficients(x))), *((x - start) / widths)])
        return known[key]

    def slopes(x: Array) -> Array:
        moved = [residuals(x + MOVE * unit) for unit in np.eye(len(x))]
        return np.column_stack([(there - residuals(x)) / MOVE for there in moved])

    # What lies far out is no better, and takes as long to simulate as its steps last.
    edges = start - REACH * widths, start + REACH * widths
    best = least_squares(residuals, start, slopes, edges, loss="soft_l1", x_scale=widths, max_nfev=ROUNDS)
    return coefficients(best.x)


@dataclass(frozen=True)
class _Fit:
    """What a sketch is held against."""

    survey: Survey
    baseline: TrialResult
    measured: Measurement
    schedules: Sequence[Schedule]
    slo: Slo
    shape: Shape | None

    def begin(self) -> dict[str, float]:
        """The free coefficients, where they begin."""
        step, context = self.survey.lone_itl, float(LONE_PROMPT)
        if not 0 < step < math.inf:
            step, context = self.measured.value("itl_p50"), self._usual_context
        ratio = self._context_to_weights
        weights = (1 - LAUNCH) * step / (1 + ratio * context)
        found = {
            "launch": LAUNCH * step,
            "weights": weights,
            "per_token": 1 / self.survey.prefill_speed,
            "per_context": ratio * weights,
            "entry": ENTRY * step,
        }
        return {name: value for name, value in found.items() if value}

    def sketch(self, free: Mapping[str, float]) -> Sketch:
        per_token = free["per_token"]
        pair = self.shape.pair if self.shape else 1 / (6 * self._width)
        tied = {"per_row": ROW * per_token, "per_pair": pair * per_token}
        config, context = self.baseline.config, self.survey.max_model_len
        pool = self._kv_tokens or config["max_num_seqs"] * context
        return Sketch({**free, **tied}, config, context, pool, self._memory)

    def residuals(self, sketch: Sketch) -> list[float]:
        errors = self.errors(sketch)
        return [errors[name] / width for name, width in self._widths.items()]

    def errors(self, sketch: Sketch) -> dict[str, float]:
        """Of the figures, simulated over measured, in logarithm. Raises TargetFailed and NoSketch."""
        try:
            target = sketch.target
        except SimulatedTargetError as error:
            raise NoSketch(f"the baseline's own config cannot be simulated: {error}") from None
        with target.open({}) as server:
            alone = time_alone(server, self.survey.max_model_len, 0, lambda to, load: to.run(load))
            runs = [Run(server.run(schedule), span(schedule)) for schedule in self.schedules]
        values = {name: found.value for name, found in measure(runs, self.slo).readings.items()}
        values |= dict(zip((SPEED, ALONE), (alone.prefill_speed, alone.itl), strict=True))
        return {name: _error(values.get(name, math.nan), self._wanted[name]) for name in self._widths}

    @cached_property
    def _wanted(self) -> dict[str, float]:
        values = {name: reading.value for name, reading in self.measured.readings.items()}
        return {**values, SPEED: self.survey.prefill_speed, ALONE: self.survey.lone_itl}

    @cached_property
    def _widths(self) -> dict[str, float]:
        """The figures that are held against each other, and by how much each may be off."""
        found = {name: EXACT for name in (SPEED, ALONE) if 0 < self._wanted[name] < math.inf}
        for name, reading in self.measured.readings.items():
            metric = name.partition("{")[0]
            if 0 < reading.value < math.inf and family_of(metric) in HELD:  # failed requests take for ever
                exact = metric.endswith("_p50") or metric in RATES
                found[name] = math.hypot(EXACT if exact else ROUGH, _spread(reading))
        return found

    @cached_property
    def _usual_context(self) -> float:
        """Tokens of all requests that usually run."""
        requests = [request for schedule in self.schedules for request in schedule.requests]
        each = fmean(len(r.prompt_token_ids or r.prompt or "") + r.max_tokens / 2 for r in requests)
        seqs = self.baseline.config["max_num_seqs"]
        return each * BUSY * min(self.baseline.peak_running or seqs, seqs)

    @cached_property
    def _memory(self) -> MemoryPlan | None:
        """Where it says what the weights are, and how the pool changes."""
        told = MemoryPlan(**self.survey.memory) if self.survey.memory else None
        return told if told and not told.pinned and told.fixed > 0 and told.kv_tokens > 0 else None

    @cached_property
    def _kv_tokens(self) -> int:
        """Of the baseline's pool; 0 where nobody says."""
        told = self.survey.memory
        return self.baseline.kv_tokens or (int(told["kv_tokens"]) if told else 0)

    @cached_property
    def _width(self) -> float:
        """By 12 d² weights a layer, of two bytes."""
        return (self._memory.fixed / 24 / LAYERS) ** (1 / 3) if self._memory else WIDTH

    @property
    def _context_to_weights(self) -> float:
        """Bytes of a token in the pool to those of all weights; 0 where nobody knows."""
        if memory := self._memory:
            return memory.kv_bytes / memory.kv_tokens / memory.fixed
        if self.shape:
            return self.shape.context
        return POOL / self._kv_tokens if self._kv_tokens else 0.0


def _error(simulated: float, measured: float) -> float:
    if not simulated > 0:
        return FAR
    return min(max(math.log(simulated / measured), -FAR), FAR)


def _spread(reading: Reading) -> float:
    """Standard deviation of a reading's logarithm, as far as its interval tells."""
    if not 0 < reading.low <= reading.high < math.inf:
        return 0.0
    return math.log(reading.high / reading.low) / 4
