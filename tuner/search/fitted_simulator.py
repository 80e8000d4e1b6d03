"""A simulator of an unknown server: what its steps take, fitted to what its own baseline measured.

Of a server on an unknown device a study knows, once the baseline is measured, what a lone request takes,
which gaps between tokens and times to the first one came of a load that is known request by request, and how
many tokens the KV pool holds. A few coefficients of a step are fitted to that: the baseline is simulated,
under the very load that it had, until its simulated figures are the measured ones.

Five are free. A step takes ``launch`` whatever is in it, and for its linear layers the longer of two: all
weights are read (``weights``), or every token is computed (``per_token``); it reads the keys and values of
every context (``per_context``); and a request takes ``entry`` on its way to the engine. One config cannot
tell them apart for certain, so each begins where transformers have it, and goes from there as far as the
figures ask:

- of the step of a lone request, LAUNCH_SHARE is not for weights: kernels wait for each other and for the
  host;
- keys and values are read as fast as weights, so that their sizes, which a start log or the model's config
  tells, are in proportion to their seconds; where neither does, the whole pool is taken for POOL_TO_WEIGHTS
  times as large as the weights;
- of attention the config says how its FLOP compare with those of the linear layers; without one it is 4 d per
  query-key pair and layer against 24 d² per token, where d follows from the size of the weights or is
  DEFAULT_WIDTH;
- what a request adds to a step beside its token (logits, sampling, the host) is ROW_TO_TOKEN of a prompt's
  token.
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
from loadgen.sim.model_shape import Shape
from loadgen.target import TargetFailed
from loadgen.targets.simulated import SimulatedTarget, SimulatedTargetError, fitted_target
from servers.memory_plan import MemoryPlan
from servers.slo.bounds import LATENCIES, RATES, family_of
from servers.slo.objective import Slo
from tuner.runs.load import load_seconds
from tuner.runs.measure import Run, measure
from tuner.runs.profiling import LONE_PROMPT_TOKENS, Profile, time_alone
from tuner.runs.result import Measurement, Reading, TrialResult
from tuner.search.gp import Array
from tuner.space.config import Config

NAME = "simulator fitted to the baseline"
SIMULATED_FLAGS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "long_prefill_token_threshold",
    "max_model_len",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduling_policy",
)
"""Flags of which the scheduler alone says what they do. ``gpu_memory_utilization`` is in the pool's size.
What others do to a step was not measured: configs that differ in them are simulated alike."""
BLOCK_TOKENS = 16
LAUNCH_SHARE, ENTRY_SHARE = 0.3, 0.1
"""Of a lone request's step, to begin with."""
POOL_TO_WEIGHTS = 2.0
ROW_TO_TOKEN = 0.3
DEFAULT_WIDTH, LAYERS_PER_WIDTH = 4096, 1 / 128
"""Of a model of which nothing is known; and how many layers models have for their width."""
BUSY_SHARE = 0.7
"""Of the most requests that ran at once, how many usually do."""
COEFFICIENT_LOG_SD = {"launch": 1.5, "weights": 0.5, "per_token": 0.5, "per_context": 1.0, "entry": 1.0}
"""Prior standard deviation of a coefficient's logarithm around where it begins."""
MAX_SDS = 3.0
"""How far a coefficient may go at most, in those deviations."""
FITTED_FAMILIES = {*LATENCIES, "throughput"} - {"inter_chunk"}
"""Families of figures that are to be reproduced; gaps of chunks are those of tokens."""
EXACT_LOG_SD, ROUGH_LOG_SD = 0.03, 0.05
"""By how much (in logarithm) a median or a rate, and any other figure, may be off and is reproduced."""
DIFFERENCE_STEP, MAX_EVALUATIONS = 0.1, 8
"""By how much (in logarithm) a coefficient is moved to see what it does; and how often all are at most."""
MAX_KV_TOKENS = 10_000_000
"""Of a KV pool that no load of a study fills: a larger one changes nothing, but takes long to make."""
MAX_RESIDUAL = 3.0
"""Errors (in logarithm) beyond are all alike."""
LONE_PREFILL, LONE_ITL = "prefill speed alone", "itl alone"


class CannotFit(Exception):
    """The message says what is missing."""


@dataclass(frozen=True)
class FittedSimulator:
    """``coefficients``: seconds, by the names of ``engine.sim.step_times.StepTimes``."""

    coefficients: Mapping[str, float]
    baseline: Config
    """Effective (see ``tuner.space.config``)."""
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
        return fitted_target(NAME, times, self.max_model_len, self._flags)

    def describe(self) -> str:
        ms = {name: f"{value * 1e3:.3g} ms" for name, value in self.coefficients.items()}
        error = self.errors.get("itl_es99", math.nan)
        off = "" if math.isnan(error) else f"; its own ITL ES99 is off by {abs(math.expm1(error)):.0%}"
        pool = "" if self.memory else "; all configs with the same KV pool"
        return (
            f"{ms['per_token']} per prompt token, {ms['launch']} per step and at least {ms['weights']} for "
            f"its tokens, {ms['per_row']} per request{off}{pool}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{**data, "memory": MemoryPlan(**data["memory"]) if data["memory"] else None})

    def _flags(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Of a config, what is simulated. Flags that it does not name are the baseline's."""
        whole = {**self.baseline, **config}
        given = {name: whole[name] for name in SIMULATED_FLAGS if whole.get(name) is not None}
        given["max_num_seqs"] = min(given["max_num_seqs"], given["max_num_batched_tokens"])
        return {**given, "num_gpu_blocks_override": 1 + self._pool(whole) // BLOCK_TOKENS}

    def _pool(self, config: Config) -> int:
        """Tokens."""
        more = 0 if self.memory is None else self.memory.tokens_more(config, self.baseline)
        return min(max(0, self.kv_tokens + more), MAX_KV_TOKENS)


def fit_simulator(
    profile: Profile,
    baseline: TrialResult,
    schedules: Sequence[Schedule],
    slo: Slo,
    shape: Shape | None = None,
) -> FittedSimulator:
    """``schedules``: what the baseline was loaded with. ``shape``: the model's, where it is known.

    Some forty simulations of the baseline. Raises CannotFit.
    """
    measured = baseline.measurement
    if baseline.status != "measured" or measured is None:
        raise CannotFit("the baseline could not be measured")
    if not measured.value("itl_p50") > 0:
        raise CannotFit("the baseline has no ITL")
    if not 0 < profile.prefill_speed < math.inf:
        raise CannotFit("no lone prefill could be timed")
    fit = _Fit(profile, baseline, measured, schedules, slo, shape)
    try:
        found = fit.fitted(_fitted(fit))
        return replace(found, errors=fit.errors(found))
    except TargetFailed as failure:
        raise CannotFit(f"the baseline's own config cannot be simulated: {failure.detail}") from None


def _fitted(fit: _Fit) -> dict[str, float]:
    """The coefficients that are most probable, given where they begin and how far they may go."""
    begin = fit.begin()
    start, widths = np.log([*begin.values()]), np.array([COEFFICIENT_LOG_SD[name] for name in begin])
    known: dict[bytes, Array] = {}

    def coefficients(x: Array) -> dict[str, float]:
        return dict(zip(begin, np.exp(x).tolist(), strict=True))

    def residuals(x: Array) -> Array:
        key = x.tobytes()
        if key not in known:
            known[key] = np.array([*fit.residuals(fit.fitted(coefficients(x))), *((x - start) / widths)])
        return known[key]

    def slopes(x: Array) -> Array:
        moved = [residuals(x + DIFFERENCE_STEP * unit) for unit in np.eye(len(x))]
        return np.column_stack([(there - residuals(x)) / DIFFERENCE_STEP for there in moved])

    # What lies far out is no better, and takes as long to simulate as its steps last.
    edges = start - MAX_SDS * widths, start + MAX_SDS * widths
    best = least_squares(
        residuals, start, slopes, edges, loss="soft_l1", x_scale=widths, max_nfev=MAX_EVALUATIONS
    )
    return coefficients(best.x)


@dataclass(frozen=True)
class _Fit:
    """The measurements that are fitted."""

    profile: Profile
    baseline: TrialResult
    measured: Measurement
    schedules: Sequence[Schedule]
    slo: Slo
    shape: Shape | None

    def begin(self) -> dict[str, float]:
        """The free coefficients, where they begin."""
        step, context = self.profile.lone_itl, float(LONE_PROMPT_TOKENS)
        if not 0 < step < math.inf:
            step, context = self.measured.value("itl_p50"), self._usual_context
        ratio = self._context_to_weights
        weights = (1 - LAUNCH_SHARE) * step / (1 + ratio * context)
        found = {
            "launch": LAUNCH_SHARE * step,
            "weights": weights,
            "per_token": 1 / self.profile.prefill_speed,
            "per_context": ratio * weights,
            "entry": ENTRY_SHARE * step,
        }
        return {name: value for name, value in found.items() if value}

    def fitted(self, free: Mapping[str, float]) -> FittedSimulator:
        per_token = free["per_token"]
        pair = self.shape.pair if self.shape else 1 / (6 * self._width)
        tied = {"per_row": ROW_TO_TOKEN * per_token, "per_pair": pair * per_token}
        config, context = self.baseline.config, self.profile.max_model_len
        pool = self._kv_tokens or config["max_num_seqs"] * context
        return FittedSimulator({**free, **tied}, config, context, pool, self._memory)

    def residuals(self, fitted: FittedSimulator) -> list[float]:
        errors = self.errors(fitted)
        return [errors[name] / width for name, width in self._widths.items()]

    def errors(self, fitted: FittedSimulator) -> dict[str, float]:
        """Of the figures, simulated over measured, in logarithm. Raises TargetFailed and CannotFit."""
        try:
            target = fitted.target
        except SimulatedTargetError as error:
            raise CannotFit(f"the baseline's own config cannot be simulated: {error}") from None
        with target.open({}) as server:
            alone = time_alone(server, self.profile.max_model_len, 0, lambda to, load: to.run(load))
            runs = [Run(server.run(schedule), load_seconds(schedule)) for schedule in self.schedules]
        values = {name: found.value for name, found in measure(runs, self.slo).readings.items()}
        values |= dict(zip((LONE_PREFILL, LONE_ITL), (alone.prefill_speed, alone.itl), strict=True))
        return {name: _error(values.get(name, math.nan), self._wanted[name]) for name in self._widths}

    @cached_property
    def _wanted(self) -> dict[str, float]:
        values = {name: reading.value for name, reading in self.measured.readings.items()}
        return {**values, LONE_PREFILL: self.profile.prefill_speed, LONE_ITL: self.profile.lone_itl}

    @cached_property
    def _widths(self) -> dict[str, float]:
        """The figures that are held against each other, and by how much each may be off."""
        found = {name: EXACT_LOG_SD for name in (LONE_PREFILL, LONE_ITL) if 0 < self._wanted[name] < math.inf}
        for name, reading in self.measured.readings.items():
            metric = name.partition("{")[0]
            if (
                0 < reading.value < math.inf and family_of(metric) in FITTED_FAMILIES
            ):  # failed requests take for ever
                exact = metric.endswith("_p50") or metric in RATES
                found[name] = math.hypot(EXACT_LOG_SD if exact else ROUGH_LOG_SD, _spread(reading))
        return found

    @cached_property
    def _usual_context(self) -> float:
        """Tokens of all requests that usually run."""
        requests = [request for schedule in self.schedules for request in schedule.requests]
        each = fmean(len(r.prompt_token_ids or r.prompt or "") + r.max_tokens / 2 for r in requests)
        seqs = self.baseline.config["max_num_seqs"]
        return each * BUSY_SHARE * min(self.baseline.peak_running or seqs, seqs)

    @cached_property
    def _memory(self) -> MemoryPlan | None:
        """Where it says what the weights are, and how the pool changes."""
        told = MemoryPlan(**self.profile.memory) if self.profile.memory else None
        return told if told and not told.pinned and told.fixed > 0 and told.kv_tokens > 0 else None

    @cached_property
    def _kv_tokens(self) -> int:
        """Of the baseline's pool; 0 where nothing says."""
        told = self.profile.memory
        return self.baseline.kv_tokens or (int(told["kv_tokens"]) if told else 0)

    @cached_property
    def _width(self) -> float:
        """By 12 d² weights per layer, of two bytes."""
        return (self._memory.fixed / 24 / LAYERS_PER_WIDTH) ** (1 / 3) if self._memory else DEFAULT_WIDTH

    @property
    def _context_to_weights(self) -> float:
        """Bytes of a token in the pool to those of all weights; 0 where that is not known."""
        if memory := self._memory:
            return memory.kv_bytes / memory.kv_tokens / memory.fixed
        if self.shape:
            return self.shape.context
        return POOL_TO_WEIGHTS / self._kv_tokens if self._kv_tokens else 0.0


def _error(simulated: float, measured: float) -> float:
    if not simulated > 0:
        return MAX_RESIDUAL
    return min(max(math.log(simulated / measured), -MAX_RESIDUAL), MAX_RESIDUAL)


def _spread(reading: Reading) -> float:
    """Standard deviation of a reading's logarithm, as far as its interval tells."""
    if not 0 < reading.low <= reading.high < math.inf:
        return 0.0
    return math.log(reading.high / reading.low) / 4
