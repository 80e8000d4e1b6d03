"""Two sides of results that other tools state: the run is the unit, and the runs are in no pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from loadgen.compare import ComparedMetric, Comparison, Incomparable, failures_row
from loadgen.foreign.result import StatedResult
from loadgen.measure.estimator import (
    Estimate,
    Verdict,
    estimate_unpaired,
    floor_of,
    holm,
    judge_estimate,
    overall,
)

FIGURES = (
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p99", "inter_chunk_p99", "e2e_p99", "throughput"),
    "failed",
)
"""What is compared unless asked otherwise, as far as both sides state it."""
_SAME = 0.05
"""Relative difference up to which mean lengths of prompts and answers count as one load's."""

Runs = Sequence[StatedResult]


def compare_stated(a: Runs, b: Runs, figures: Sequence[str] | None, confidence: float = 0.95) -> Comparison:
    """Compare load by load; a figure of one of several loads is named ``ttft_p99{class=LOAD}``.

    ``figures`` None: those of FIGURES that both sides state. Raises Incomparable for results of different
    tools or loads.
    """
    tools = [dict.fromkeys(run.tool for run in side) for side in (a, b)]
    if tools[0] != tools[1] or len(tools[0]) > 1:
        said = " and ".join(f"{name}: {', '.join(side)}" for name, side in zip("AB", tools, strict=True))
        raise Incomparable(f"each tool has figures of its own; compare results of one tool ({said})")
    loads = _loads(a, b)
    rows = [
        (f"{figure}{{class={load}}}" if len(loads) > 1 else figure, figure, sides)
        for load, sides in loads.items()
        for figure in (figures or [name for name in FIGURES if _stated(name, sides)])
    ]
    faults = [
        f"{side}, {run.origin}: {fault}"
        for side, runs in (("A", a), ("B", b))
        for run in runs
        for fault in run.faults
    ]
    compared = _rows(rows, confidence)
    verdict: Verdict = "invalid" if faults else overall([row.verdict for row in compared])
    used = [list(chain.from_iterable(sides[at] for sides in loads.values())) for at in (0, 1)]
    return Comparison(
        verdict,
        compared,
        (),
        confidence,
        together=False,
        notes=(*faults, *_notes(used[0], used[1], a, b)),
        told=f"{len(used[0])} and {len(used[1])} runs, as stated by {next(iter(tools[0]))}",
    )


def _loads(a: Runs, b: Runs) -> dict[str, tuple[list[StatedResult], list[StatedResult]]]:
    """The runs of each load that both sides have, as far as their files state it.

    Raises Incomparable for none, or for different lengths.
    """
    loads: dict[str, tuple[list[StatedResult], list[StatedResult]]] = {}
    left = list(b)
    for asked in dict.fromkeys(run.asked for run in a):
        others = [run for run in left if asked.matches(run.asked)]
        if others:
            loads[str(asked)] = ([run for run in a if run.asked == asked], others)
            left = [run for run in left if run not in others]
    if not loads:
        said = [
            f"{name}: {'; '.join(dict.fromkeys(str(run.asked) for run in side))}"
            for name, side in (("A", a), ("B", b))
        ]
        raise Incomparable(f"no load is on both sides ({', '.join(said)}); measure both with one load")
    for load, runs in loads.items():
        for name in ("prompt_tokens", "output_tokens"):
            means = [_mean([value for run in side if (value := getattr(run, name))]) for side in runs]
            if abs(means[0] - means[1]) > _SAME * max(means):
                what = name.replace("_", " ")
                raise Incomparable(f"{load}: mean {what} are {means[0]:,.0f} on A and {means[1]:,.0f} on B")
    return loads


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _stated(figure: str, sides: tuple[Runs, Runs]) -> bool:
    return all(math.isfinite(_value(run, figure)) for side in sides for run in side)


def _value(run: StatedResult, figure: str) -> float:
    if figure in ("failed", "completed"):
        count = getattr(run, figure)
        return math.nan if count is None else float(count)
    return run.value(figure)


def _rows(
    rows: Sequence[tuple[str, str, tuple[Runs, Runs]]], confidence: float
) -> tuple[ComparedMetric, ...]:
    """Holm's adjustment is over the figures that have a p-value."""
    values = [[[_value(run, figure) for run in side] for side in sides] for _, figure, sides in rows]
    seen = [estimate_unpaired(row[0], a, b, confidence) for row, (a, b) in zip(rows, values, strict=True)]
    adjusted = iter(holm([found.p for found in seen if found.has_ratio]))
    return tuple(
        _row(name, figure, found, next(adjusted) if found.has_ratio else math.nan, sides, confidence)
        for (name, figure, sides), found in zip(rows, seen, strict=True)
    )


def _row(
    name: str, figure: str, seen: Estimate, p: float, sides: tuple[Runs, Runs], confidence: float
) -> ComparedMetric:
    if figure == "failed" and _stated(figure, sides):
        failed, done = (
            [sum(_value(run, what) for run in side) for side in sides] for what in ("failed", "completed")
        )
        return failures_row(name, failed[0], failed[0] + done[0], failed[1], failed[1] + done[1])
    if seen.has_ratio:
        verdict = judge_estimate(seen, p, alpha=1 - confidence)
        floor = floor_of(name)
        return ComparedMetric(name, seen.a, seen.b, seen.ratio, seen.low, seen.high, p, floor, verdict)
    lacking = [
        f"{bad} of {len(side)} runs of {letter}"
        for letter, side in zip("AB", sides, strict=True)
        if (bad := sum(not math.isfinite(_value(run, figure)) for run in side))
    ]
    note = f"not stated by {' and '.join(lacking)}" if lacking else "no ratio of zeros"
    nan = math.nan
    return ComparedMetric(name, seen.a, seen.b, nan, nan, nan, nan, floor_of(name), "inconclusive", note)


def _notes(used_a: Runs, used_b: Runs, a: Runs, b: Runs) -> list[str]:
    """What was left out, and what the files cannot say."""
    notes = []
    if min(len(used_a), len(used_b)) < 2:
        notes.append(
            "one run of a side has no spread: repeat the benchmark, and give a folder of its results"
        )
    for letter, used, side in (("A", used_a, a), ("B", used_b, b)):
        if len(used) < len(side):
            notes.append(f"{len(side) - len(used)} runs of {letter} have a load that the other side has not")
    models = [sorted({run.model for run in side if run.model}) for side in (used_a, used_b)]
    if models[0] != models[1]:
        notes.append(f"the models differ: A {', '.join(models[0])}, B {', '.join(models[1])}")
    return notes + list(dict.fromkeys(line for run in (*used_a, *used_b) for line in run.limits))
