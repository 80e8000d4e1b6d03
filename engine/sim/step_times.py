"""How long a step takes: a few named coefficients, fitted to measured steps or derived from a data sheet
(``engine/sim/devices.py``)."""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from engine.errors import EngineUserError
from engine.step import StepPlan

FEW_TOKENS, MIN_REPEATS = 40, 5
"""Numbers of tokens up to FEW_TOKENS that were measured MIN_REPEATS times have a time of their own in the
fit. Kernels work in tiles of rows: one row more than a tile can cost as much as a tile, and seven rows more
than eight."""
KNOT_TOKENS = (64, 128, 256, 512, 1024, 2048)
"""Beyond, the numbers between which the fitted time of the linear layers is a straight line that rises."""
TRIMMED_SHARE = 0.05
"""Share of the samples that the fit drops as noise of a shared machine."""
MIN_GROUP_SAMPLES, GROUP_WIDTH_RATIO, NUM_QUANTILES = 20, 1.5, 20
"""Of measured Groups: the fewest samples in one; the ratio of its bound to its smallest key, larger only to
reach that number; how many values stand for it."""

Groups = tuple[tuple[float, tuple[float, ...]], ...]
"""Pairs of (bound, values), bounds ascending: the values, equally likely, seen for keys up to the bound. The
last values are also for keys beyond it."""


class StepTimesError(EngineUserError):
    """Text that holds no step times."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do, in the counts that its time depends on."""

    tokens: int
    """Token slots computed, padding included."""
    sequences: int
    """Requests served, padding included."""
    rows: int
    """Rows of logits: what emits, and its drafts."""
    context: int
    """Tokens whose keys and values are read, once per sequence."""
    pairs: int
    """Query-key pairs of causal attention."""
    moved_blocks: int = 0
    """KV blocks copied between host and device."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """O(requests). Each padding is a sequence that attends to itself."""
        rows, padding, decodes = plan.rows, plan.padding, plan.fast_decodes
        starts, counts = rows.starts, rows.counts
        tokens, sequences, context = sum(counts), len(counts), sum(starts)
        if tokens == sequences:  # every request decodes one token: the common step
            pairs = context + tokens
        else:
            pairs = sum(n * start + n * (n + 1) // 2 for start, n in zip(starts, counts, strict=True))
        if decodes.count:
            tokens, pairs = tokens + decodes.count, pairs + decodes.context + decodes.count
            sequences, context = sequences + decodes.count, context + decodes.context
        if padding:
            tokens += sum(padding)
            pairs += sum(n * (n + 1) // 2 for n in padding)
        return cls(
            tokens=tokens,
            sequences=sequences + len(padding),
            rows=sequences - len(rows.silent) + sum(map(len, rows.drafts.values())),
            context=context + tokens,
            pairs=pairs,
            moved_blocks=len(plan.swap_out) + len(plan.swap_in),
        )

    @classmethod
    def of_decodes(cls, count: int, context: int) -> StepLoad:
        """Of a step in which ``count`` requests with ``context`` computed tokens decode, and nothing else."""
        return cls(count, count, count, context + count, context + count)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, host and device apart, as a sum of what it does.

    host   = host + host_per_sequence * sequences
    device = launch + linear(tokens) + per_row * rows
             + per_exchanged_token * tokens + per_context * context + per_pair * pairs
             + per_moved_block * moved_blocks
             (a step without tokens: the last term alone)
    linear = max(weights, per_token * tokens), or by ``curve``

    The maximum is the roofline of the linear layers: few tokens wait for the weights to be read, many for
    the products to be computed. All coefficients are in seconds, or seconds for each of StepLoad's counts.
    """

    host: float = 0.0
    """Scheduling, inputs, bookkeeping, metrics: whatever the device waits for between synchronous steps."""
    host_per_sequence: float = 0.0
    overlap: float = 0.5
    """Share of the host's time that async scheduling spends while the device computes: planning, about half
    of it. Booking what a step emitted has to wait for it."""
    launch: float = 0.0
    """What every step costs the device."""
    weights: float = 0.0
    """Reading all weights once."""
    per_token: float = 0.0
    per_row: float = 0.0
    per_exchanged_token: float = 0.0
    """Of the exchange between the devices of a tensor-parallel group."""
    per_context: float = 0.0
    per_pair: float = 0.0
    per_moved_block: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    """As measured: the seconds of the linear layers at some numbers of tokens, ascending; straight lines
    between and beyond. Kernels have better and worse shapes, which two coefficients do not show."""
    spread: Groups = ()
    """As measured: what the device's seconds of a step by the coefficients may have to be multiplied with, by
    these seconds. Cores that are shared make a short step half as long again now and then, and a percentile
    lives on that."""
    entry: float = 0.0
    """From the sending of a request to the engine's queue, and the way of its answers back."""
    entry_per_token: float = 0.0
    """Per token of its prompt."""
    delivery: Groups = ()
    """As measured: seconds that what a step emitted may come later to the client than at best, by how many
    requests it emitted for. Processes that share cores with the engine wait for their turn now and then."""
    source: str = ""
    """Where the coefficients come from, in words."""

    def host_seconds(self, load: StepLoad) -> float:
        return self.host + self.host_per_sequence * load.sequences

    def device_seconds(self, load: StepLoad) -> float:
        moving = self.per_moved_block * load.moved_blocks
        if not load.tokens:
            return moving
        return (
            self.launch
            + self._linear(load.tokens)
            + self.per_row * load.rows
            + self.per_exchanged_token * load.tokens
            + self.per_context * load.context
            + self.per_pair * load.pairs
            + moving
        )

    def entry_seconds(self, prompt_tokens: int) -> float:
        return self.entry + self.entry_per_token * prompt_tokens

    def _linear(self, tokens: int) -> float:
        curve = self.curve
        if not curve:
            return max(self.weights, self.per_token * tokens)
        if len(curve) == 1:
            return curve[0][1]
        after = min(max(bisect_left(curve, (tokens,)), 1), len(curve) - 1)
        (left, low), (right, high) = curve[after - 1], curve[after]
        return max(low + (tokens - left) * (high - low) / (right - left), 0.0)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> StepTimes:
        """Raises StepTimesError that says what is wrong."""
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise StepTimesError(f"not JSON ({error})") from None
        if not isinstance(given, dict):
            raise StepTimesError("step times must be a JSON object")
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise StepTimesError(f"unknown coefficient {unknown[0]!r}; known are {', '.join(sorted(known))}")
        curve = given.pop("curve", [])
        groups = {name: _groups(name, given.pop(name, [])) for name in ("spread", "delivery")}
        for name, value in given.items():
            if name != "source" and not _is_amount(value):
                raise StepTimesError(f"{name} must be a number, 0 or more, is {value!r:.40}")
        if not _is_curve(curve):
            raise StepTimesError(f"curve must be pairs of tokens, ascending, and seconds, is {curve!r:.40}")
        return cls(**given, **groups, curve=tuple((tokens, seconds) for tokens, seconds in curve))


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_curve(value: Any) -> bool:
    return _are_pairs(value) and all(map(_is_amount, chain.from_iterable(value))) and _ascends(value)


def _groups(name: str, value: Any) -> Any:
    """Raises StepTimesError for what are no Groups."""
    if _are_pairs(value) and all(isinstance(values, list) and values for _, values in value):
        amounts = chain.from_iterable([bound, *values] for bound, values in value)
        if all(map(_is_amount, amounts)) and _ascends(value):
            return tuple((bound, tuple(values)) for bound, values in value)
    raise StepTimesError(f"{name} must be pairs of a bound, ascending, and values, is {value!r:.40}")


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _ascends(pairs: Sequence[Sequence[Any]]) -> bool:
    return all(a[0] < b[0] for a, b in pairwise(pairs))


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step. ``host_seconds`` is None where the step before it is not known."""

    load: StepLoad
    device_seconds: float
    host_seconds: float | None = None
    ended: float = 0.0
    """When it ended, on the clock that measured it."""


def fit_step_times(samples: Sequence[StepSample], source: str = "fitted") -> StepTimes:
    """The coefficients that explain measured steps best, none negative (NNLS on relative errors).

    The linear layers become a curve, as far as the samples go; the worst twentieth of the samples is dropped.
    How much they spread is kept. ``per_moved_block`` and ``per_exchanged_token`` are not fitted, nor are
    ``entry`` and ``delivery``. Raises ValueError below 10 samples.
    """
    if len(samples) < 10:
        raise ValueError(f"{len(samples)} measured steps are too few to fit step times to; 10 is the least")
    loads = [sample.load for sample in samples]
    tokens = [load.tokens for load in loads]
    few, many = _knots(tokens)
    others = np.array([(load.rows, load.context, load.pairs) for load in loads], dtype=float)
    columns = np.hstack([others, _hats(tokens, few), _hinges(tokens, [few[-1], *many])])
    fitted = _relative_nnls(columns, np.array([sample.device_seconds for sample in samples])).tolist()
    per_row, per_context, per_pair = fitted[:3]
    levels, slopes = fitted[3 : 3 + len(few)], fitted[3 + len(few) :]
    rises = (slope * (b - a) for slope, (a, b) in zip(slopes, pairwise([few[-1], *many]), strict=True))
    levels += [levels[-1] + rise for rise in accumulate(rises)]
    launch = min(levels)
    host, host_per_sequence = _fit_host([sample for sample in samples if sample.host_seconds is not None])
    times = StepTimes(
        host=host,
        host_per_sequence=host_per_sequence,
        launch=launch,
        per_row=per_row,
        per_context=per_context,
        per_pair=per_pair,
        curve=tuple((float(knot), level - launch) for knot, level in zip(few + many, levels, strict=True)),
        source=source,
    )
    fitted = [times.device_seconds(load) for load in loads]
    ratios = [sample.device_seconds / seconds for sample, seconds in zip(samples, fitted, strict=True)]
    return replace(times, spread=group_samples(list(zip(fitted, ratios, strict=True))))


def group_samples(samples: Sequence[tuple[float, float]]) -> Groups:
    """Groups of ``samples``, pairs of (key, value). A group's bound is its largest key."""
    groups: list[list[tuple[float, float]]] = []
    for sample in sorted(samples):
        if not groups or (
            sample[0] > GROUP_WIDTH_RATIO * groups[-1][0][0] and len(groups[-1]) >= MIN_GROUP_SAMPLES
        ):
            groups.append([])
        groups[-1].append(sample)
    if len(groups) > 1 and len(groups[-1]) < MIN_GROUP_SAMPLES:
        groups[-2:] = [groups[-2] + groups[-1]]
    places = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    return tuple(
        (group[-1][0], tuple(np.quantile([value for _, value in group], places).round(5).tolist()))
        for group in groups
    )


def draw_value(groups: Groups, what: float, chance: random.Random) -> float | None:
    """A random value of the group that ``what`` falls into; None where there are no groups."""
    for bound, values in groups:
        if what <= bound:
            return chance.choice(values)
    return chance.choice(groups[-1][1]) if groups else None


def _knots(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Where the curve has its points, ascending: as many as have a level of their own, and those beyond."""
    times = Counter(tokens)
    few = sorted(count for count in times if count <= FEW_TOKENS and times[count] >= MIN_REPEATS) or [
        min(tokens)
    ]
    most = max(tokens)
    beyond = [knot for knot in KNOT_TOKENS if few[-1] < knot < most]
    return few, [*beyond, most] if most > few[-1] else beyond


def _hats(tokens: Sequence[int], knots: Sequence[int]) -> np.ndarray:
    """How much each number of tokens has of the level at each knot: straight lines between, flat outside."""
    levels = np.eye(len(knots))
    return np.array([np.interp(tokens, knots, level) for level in levels]).T


def _hinges(tokens: Sequence[int], knots: Sequence[int]) -> np.ndarray:
    """How far each number of tokens reaches into the piece between two knots."""
    given = np.array(tokens, dtype=float)[:, None]
    low, high = np.array(knots[:-1], dtype=float), np.array(knots[1:], dtype=float)
    return np.clip(given - low, 0.0, high - low)


def _fit_host(samples: Sequence[StepSample]) -> tuple[float, float]:
    """By errors relative to the whole step: what the host takes of a long one matters less."""
    if not samples:
        return 0.0, 0.0
    columns = np.array([(1, sample.load.sequences) for sample in samples], dtype=float)
    hosts = np.array([sample.host_seconds for sample in samples], dtype=float)
    wholes = hosts + [sample.device_seconds for sample in samples]
    coefficients = _relative_nnls(columns, hosts, wholes)
    return float(coefficients[0]), float(coefficients[1])


def _relative_nnls(
    columns: np.ndarray, seconds: np.ndarray, relative_to: np.ndarray | None = None
) -> np.ndarray:
    """Non-negative least squares on relative errors, without the worst. ``relative_to`` None: ``seconds``."""
    from scipy.optimize import nnls

    unit = np.maximum(seconds if relative_to is None else relative_to, 1e-9)  # a coarse clock may say 0
    scaled, wanted = columns / unit[:, None], seconds / unit
    widths = np.maximum(scaled.max(axis=0), 1e-300)  # so that seconds and pairs are of one size to the solver

    def solve(rows: np.ndarray, right: np.ndarray) -> np.ndarray:
        found, _ = nnls(rows / widths, right)
        result: np.ndarray = found / widths
        return result

    errors = np.abs(scaled @ solve(scaled, wanted) - wanted)
    kept = np.argsort(errors, kind="stable")[: max(len(errors) - int(TRIMMED_SHARE * len(errors)), 1)]
    return solve(scaled[kept], wanted[kept])
