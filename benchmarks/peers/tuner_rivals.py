"""Other ways to search, as their authors describe them; each works on a Bed until its budget is spent.

Written from papers and documentation, in this project's own code: what is compared is the way of searching,
on equal terms. Each returns the config that it recommends; None for the baseline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna
from scipy.special import ndtr
from scipy.stats import qmc

from benchmarks.tuner.bed import Bed, BudgetSpent, Observation
from benchmarks.tuner.problems import DRAFTS, MEMORY, SEQS, SPECULATION, THRESHOLD, TOKENS

Array = npt.NDArray[np.float64]
Flags = Mapping[str, Any]


def chance(bed: Bed, seed: int) -> Flags | None:
    """Uniform draws without replacement, one run each, the best wins."""
    configs = list(bed.problem.configs())
    random.Random(seed).shuffle(configs)
    return until_spent(bed, (bed.measure(flags) for flags in configs))


def tpe(bed: Bed, seed: int) -> Flags | None:
    """Optuna's TPE with its defaults: a failed launch is told as failed, bounds as constraints."""
    study = optuna.create_study(
        direction=bed.objective.direction, sampler=optuna.samplers.TPESampler(seed=seed)
    )

    def trials() -> Iterator[Observation]:
        while True:
            trial = study.ask()
            chosen = {
                name: values[trial.suggest_int(name, 0, len(values) - 1)]
                for name, values in bed.problem.axes.items()
            }
            seen = bed.measure(bed.problem.flags(chosen))
            for name, violation in seen.violations.items():
                trial.set_constraint(name, violation)
            if seen.crash or math.isnan(seen.value):
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, seen.value)
            yield seen

    return until_spent(bed, trials())


def grid(bed: Bed, seed: int) -> Flags | None:
    """In the order of vLLM's auto_tune.sh: the highest memory share at which the largest server starts, then
    every number of sequences with every token budget, upwards. Other knobs stay.
    """
    axes = bed.problem.axes

    def trials() -> Iterator[Observation]:
        largest = {TOKENS: axes[TOKENS][-1], SEQS: axes[SEQS][-1]}
        memory = {}
        for share in reversed(axes.get(MEMORY, ())):
            memory = {MEMORY: share}
            if bed.start_only(with_(bed, largest, memory)):
                break
        for seqs in axes[SEQS]:
            for tokens in axes[TOKENS]:
                yield bed.measure(with_(bed, {TOKENS: tokens, SEQS: seqs}, memory))

    return until_spent(bed, trials())


def staircase(bed: Bed, seed: int) -> Flags | None:
    """By hand: memory, sequences, tokens, then the rest; a step at a time, kept while it improves."""

    def trials() -> Iterator[Observation]:
        here = bed.baseline
        for axis in (MEMORY, SEQS, TOKENS, THRESHOLD, DRAFTS):
            for step in (1, -1) if axis in bed.problem.axes else ():
                moved = False
                while ahead := stepped(bed, here.flags, axis, step):
                    seen = bed.measure(ahead)
                    yield seen
                    if not better(bed, seen, here):
                        break
                    here, moved = seen, True
                if moved:
                    break

    return until_spent(bed, trials())


def staged(bed: Bed, seed: int) -> Flags | None:
    """As polyserve does: a memory plan chooses the pool, one knob a stage, coarse first and then around the
    best; near ties are measured again, and the three best are confirmed on fresh runs. Ties within 2 % go to
    the config that changes less.
    """
    confirmed_runs, again = 3, 2
    axes = bed.problem.axes
    confirm_seconds = 3 * (bed.problem.start_seconds + confirmed_runs * bed.problem.run_seconds)
    budget = bed.problem.budget - confirm_seconds

    def sweep(axis: str, values: Sequence[int | float], here: Observation) -> Observation:
        best = here
        for value in values:
            if bed.world.seconds > budget:
                break
            flags = changed(bed, here.flags, axis, value)
            if flags == here.flags or any(seen.flags == flags for seen in bed.seen):
                continue
            seen = bed.measure(flags)
            if better(bed, seen, best):
                best = seen
        return best

    here = bed.baseline
    try:
        for planned in [m for m in axes.get(MEMORY, ()) if m <= 0.92][-1:]:  # leaves eight per cent free
            here = sweep(MEMORY, [planned], here)
        for axis in (SEQS, TOKENS, THRESHOLD, DRAFTS):
            if axis in axes:
                here = sweep(axis, axes[axis][::2], here)
        while bed.world.seconds <= budget:
            before = here
            for axis in (TOKENS, SEQS, THRESHOLD, DRAFTS, MEMORY):
                if axis in axes:
                    at = index_of(bed, here.flags, axis)
                    here = sweep(axis, axes[axis][max(0, at - 1) : at + 2], here)
            if here is before:
                break
    except BudgetSpent:
        pass
    return confirmed(bed, confirmed_runs + again - 2)


def confirmed(bed: Bed, runs: int) -> Flags | None:
    """Of the three best, the one with the best median on fresh runs, which must hold the bounds."""
    top = sorted((s for s in bed.seen if s.feasible), key=bed.loss)[:3]
    found: list[tuple[float, Flags]] = []
    for seen in top:
        try:
            fresh = bed.again(seen.flags, runs)
        except BudgetSpent:
            break
        held = all(float(np.median([f.violations[name] for f in fresh])) <= 0 for name in fresh[0].violations)
        if held:
            found.append((float(np.median([bed.loss(f) for f in fresh])), seen.flags))
    if not found:
        return None
    best = min(loss for loss, _ in found)
    near = [flags for loss, flags in found if loss <= best + 0.02 * abs(best)]
    return min(near, key=lambda flags: sum(v != bed.problem.baseline.get(k) for k, v in flags.items()))


def constrained_bo(bed: Bed, seed: int) -> Flags | None:
    """In SCOOT's manner: known rules prune the space, a quasi-random start, Gaussian processes for objective
    and bounds, a random forest for whether a server comes up; expected improvement times both chances.
    """
    initial = 8
    rng = np.random.default_rng(seed)
    configs = [
        f for f in bed.problem.configs() if f[TOKENS] >= f[SEQS] and (f.get(THRESHOLD) or 0) < f[TOKENS]
    ]
    points = np.array([point(bed, flags) for flags in configs])
    untried = np.ones(len(configs), dtype=bool)

    def nearest(target: Array) -> int:
        distances = ((points - target) ** 2).sum(axis=1)
        return int(np.argmin(np.where(untried, distances, np.inf)))

    def trials() -> Iterator[Observation]:
        sobol = qmc.Sobol(points.shape[1], seed=rng).random(initial)
        for target in sobol:
            chosen = nearest(target)
            untried[chosen] = False
            yield bed.measure(configs[chosen])
        while untried.any():
            score = acquisition(bed, points, rng)
            chosen = int(np.argmax(np.where(untried, score, -np.inf)))
            untried[chosen] = False
            yield bed.measure(configs[chosen])

    return until_spent(bed, trials())


def acquisition(bed: Bed, points: Array, rng: np.random.Generator) -> Array:
    """Of every config."""
    tried = np.array([point(bed, seen.flags) for seen in bed.seen])
    came_up = np.array([not seen.crash for seen in bed.seen])
    score = forest(tried, came_up, points, rng)
    served = [seen for seen in bed.seen if not seen.crash]
    if not served:
        return score
    known = tried[came_up]
    for name in served[0].violations:
        values = np.clip([seen.violations[name] for seen in served], -1.0, 2.0)
        if np.ptp(values) > 0:
            mean, deviation = gaussian_process(known, values, points)
            score = score * ndtr(-mean / deviation)
    if bed.best is not None:
        losses = np.array([bed.loss(seen) for seen in served])
        losses = np.where(np.isfinite(losses), losses, np.nanmax(losses))
        mean, deviation = gaussian_process(known, losses, points)
        z = (bed.loss(bed.best) - mean) / deviation
        score = score * deviation * (z * ndtr(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
    return score + 1e-12 * rng.random(len(points))


def gaussian_process(known: Array, values: Array, points: Array) -> tuple[Array, Array]:
    """Mean and deviation at ``points``: Matérn 5/2, its length and noise by the likelihood on a grid."""
    centre, spread = float(values.mean()), float(values.std()) or 1.0
    y = (values - centre) / spread
    best: tuple[float, float, Any, Any] | None = None
    for length in (0.15, 0.3, 0.6, 1.2):
        kernel = matern(known, known, length)
        for noise in (1e-3, 1e-2, 1e-1):
            factor = np.linalg.cholesky(kernel + noise * np.eye(len(y)))
            alpha = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
            likelihood = -0.5 * float(y @ alpha) - float(np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0]:
                best = likelihood, length, factor, alpha
    assert best is not None
    _, length, factor, alpha = best
    cross = matern(points, known, length)
    explained = np.linalg.solve(factor, cross.T)
    variance = np.maximum(1 - (explained**2).sum(axis=0), 1e-9)
    return centre + spread * (cross @ alpha), spread * np.sqrt(variance)


def matern(a: Array, b: Array, length: float) -> Array:
    squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None] - 2 * a @ b.T
    scaled = np.sqrt(5 * np.maximum(squared, 0)) / length
    result: Array = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
    return result


def forest(known: Array, labels: Array, points: Array, rng: np.random.Generator, trees: int = 30) -> Array:
    """The share of trees that say yes; all of them where nothing ever failed."""
    if labels.all():
        return np.ones(len(points))
    votes = np.zeros(len(points))
    for _ in range(trees):
        rows = rng.integers(len(known), size=len(known))
        votes += tree(known[rows], labels[rows].astype(float), points, rng)
    return np.maximum(votes / trees, 1e-3)


def tree(known: Array, labels: Array, points: Array, rng: np.random.Generator) -> Array:
    """Grown until leaves are pure, each split the best of a few random axes."""
    share = float(labels.mean())
    if share in (0.0, 1.0) or len(labels) < 2:
        return np.full(len(points), share)
    best: tuple[float, int, float] | None = None
    axes = rng.permutation(known.shape[1])
    for axis in axes:
        levels = np.unique(known[:, axis])
        for cut in (levels[1:] + levels[:-1]) / 2:
            left = known[:, axis] < cut
            impurity = sum(
                part.sum() * float(labels[part].mean()) * (1 - float(labels[part].mean()))
                for part in (left, ~left)
            )
            if best is None or impurity < best[0] - 1e-12:
                best = impurity, int(axis), float(cut)
        if best is not None and axis == axes[1]:
            break  # two axes are enough to choose from, or trees would be alike
    if best is None:
        return np.full(len(points), share)
    _, axis, cut = best
    left, there = known[:, axis] < cut, points[:, axis] < cut
    result = np.empty(len(points))
    result[there] = tree(known[left], labels[left], points[there], rng)
    result[~there] = tree(known[~left], labels[~left], points[~there], rng)
    return result


RIVALS: Mapping[str, Callable[[Bed, int], Flags | None]] = {
    "random": chance,
    "TPE, defaults": tpe,
    "grid (auto_tune)": grid,
    "staircase": staircase,
    "staged (polyserve)": staged,
    "constrained BO (SCOOT)": constrained_bo,
}


def until_spent(bed: Bed, trials: Iterator[Observation]) -> Flags | None:
    """Run it, and take the best single measurement."""
    try:
        for _ in trials:
            pass
    except BudgetSpent:
        pass
    return None if bed.best is None else bed.best.flags


def better(bed: Bed, new: Observation, old: Observation) -> bool:
    """Feasible before infeasible; among those the objective, else the smaller excess."""
    if new.feasible != old.feasible:
        return new.feasible
    if new.feasible:
        return bed.objective.better(new.value, old.value)
    return excess(new) < excess(old)


def excess(seen: Observation) -> float:
    return math.inf if seen.crash else sum(max(0.0, v) for v in seen.violations.values())


def with_(bed: Bed, *chosen: Mapping[str, int | float]) -> dict[str, Any]:
    """The baseline with these values."""
    return {**bed.problem.baseline, **{name: value for part in chosen for name, value in part.items()}}


def value_of(flags: Flags, axis: str) -> int | float:
    value = (flags.get(SPECULATION) or {}).get(DRAFTS, 0) if axis == DRAFTS else flags.get(axis, 0)
    assert isinstance(value, int | float)
    return value


def changed(bed: Bed, flags: Flags, axis: str, value: int | float) -> dict[str, Any]:
    """``flags`` with another value on one axis."""
    if axis != DRAFTS:
        return {**flags, axis: value}
    rest = {name: item for name, item in flags.items() if name != SPECULATION}
    return {**rest, SPECULATION: {"method": "ngram", DRAFTS: value}} if value else rest


def index_of(bed: Bed, flags: Flags, axis: str) -> int:
    """Of the value on the axis that is nearest."""
    values, here = bed.problem.axes[axis], value_of(flags, axis)
    return min(range(len(values)), key=lambda i: abs(values[i] - here))


def stepped(bed: Bed, flags: Flags, axis: str, step: int) -> dict[str, Any] | None:
    values = bed.problem.axes[axis]
    to = index_of(bed, flags, axis) + step
    return changed(bed, flags, axis, values[to]) if 0 <= to < len(values) else None


def point(bed: Bed, flags: Flags) -> list[float]:
    """In the unit cube, by the place on each ladder."""
    return [index_of(bed, flags, axis) / max(1, len(values) - 1) for axis, values in bed.problem.axes.items()]
