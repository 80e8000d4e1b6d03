"""Figures of paired runs, and what they say about what was promised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from doctor.diagnosis.expectation import judge_expectation, parse_expectation
from doctor.metrics.signals import SIGNALS
from doctor.metrics.sources import Scrapes
from doctor.proof.result import ProofMetric, ProofVerdict
from loadgen.compare import Comparison, Pair, split_metric
from loadgen.measure.estimator import Estimate, estimate, run_value, whole
from loadgen.measure.record import Records
from loadgen.measure.stats import METRICS, RATES, Summary
from servers.errors import SourceError
from servers.reading import Number

CLIENT_NAMES: Mapping[str, str] = {"generation_rate": "throughput"}
"""Signals of the server that a client measures better, by the client's name for it."""
ALWAYS = ("itl_p99", "ttft_p95", "throughput")
"""Shown whatever was promised: what users ask about first."""
_SUMMED = ("requests", "count", "tokens/s", "1/s")


def rows_of(
    pairs: Sequence[Pair], promised: Mapping[str, str], slo: Mapping[str, float]
) -> tuple[ProofMetric, ...]:
    """Every promised figure, and those of :data:`ALWAYS`. ``slo`` resolves what signals ask of objectives.

    Raises KeyError for a figure that neither the client nor the server has.
    """
    rows = []
    clients = {_client_name(figure) for figure in promised}
    for figure in dict.fromkeys([*promised, *(name for name in ALWAYS if name not in clients)]):
        a, b = ([value(getattr(pair, side), figure, slo) for pair in pairs] for side in ("a", "b"))
        rows.append(_row(figure, estimate(_client_name(figure), a, b), promised.get(figure)))
    return tuple(rows)


def _row(figure: str, seen: Estimate, text: str | None) -> ProofMetric:
    outcome = None if text is None else judge_expectation(parse_expectation(text), seen)
    return ProofMetric(figure, seen, text, outcome)


def value(records: Records, figure: str, slo: Mapping[str, float]) -> float:
    """Of one run: the client's figure where it has one, else the server's signal. Raises KeyError."""
    name, cls = split_metric(_client_name(figure))
    if name in RATES or name.rpartition("_")[0] in METRICS:
        return run_value(Summary(whole(records)), name, cls)
    return _signal(records, name, slo)


def judged(rows: Sequence[ProofMetric], promised: Mapping[str, str]) -> tuple[ProofMetric, ...] | None:
    """The same measurements beside other promises; None where one was not measured."""
    known = {row.figure: row.change for row in rows}
    if not promised.keys() <= known.keys():
        return None
    order = dict.fromkeys([*promised, *known])
    return tuple(_row(figure, known[figure], promised.get(figure)) for figure in order)


def verdict_of(rows: Sequence[ProofMetric], pairs: int, invalid: bool) -> ProofVerdict:
    """The first promise is the headline: it must be met, and none may be missed."""
    outcomes = [row.outcome for row in rows if row.outcome not in (None, "allowed")]
    if not outcomes or not pairs or invalid:
        return "inconclusive"
    if "missed" in outcomes:
        return "refuted"
    return "verified" if outcomes[0] == "met" else "inconclusive"


def is_invalid(found: Comparison, simulated: bool) -> bool:
    """Whether a run may not be believed. A client in virtual time is never its own limit."""
    return found.verdict == "invalid" and not simulated


def notes_of(found: Comparison, simulated: bool) -> tuple[str, ...]:
    """What a reader must know beside the figures."""
    notes = [] if simulated else [*found.notes]
    if failed := sum(not record.ok for pair in found.pairs for record in pair.b.requests):
        notes.append(f"{failed} requests failed on side B")
    return tuple(notes)


def _client_name(figure: str) -> str:
    return CLIENT_NAMES.get(figure, figure)


def _signal(records: Records, name: str, slo: Mapping[str, float]) -> float:
    """Over a fleet: what is counted is added up, of the rest the mean, of imbalance the worst."""
    signal = SIGNALS[name]
    try:
        evaluator = Scrapes(records.scrapes).observe(None, slo).evaluator
    except SourceError:
        return math.nan
    points = [r.point for r in evaluator.read(signal).values() if isinstance(r, Number)]
    if not points:
        return math.nan
    if signal.unit in _SUMMED:
        return sum(points)
    return max(points) if signal.unit == "ratio" else sum(points) / len(points)
