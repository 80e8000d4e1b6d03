"""Results in the forms that other tools read: cases for JUnit, CSV, github-action-benchmark's and Bencher's
JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from typing import Any

from loadgen.compare import ComparedMetric, Comparison, split_metric
from loadgen.measure.estimator import rises
from loadgen.measure.record import Records
from loadgen.measure.run_validity import VERDICT_WORDS
from loadgen.measure.stats import METRICS, RATES, FigureError, Summary, frame
from loadgen.output.junit import Case
from servers.slo.bounds import Bound, format_value

_HEADLINES = ("ttft_p50", "ttft_p95", "tpot_p50", "itl_p50", "itl_p99", "e2e_p95", *RATES[:2])


def comparison_cases(comparison: Comparison) -> Iterator[Case]:
    """One case per metric; an invalid comparison is one failed case more."""
    if comparison.verdict == "invalid":
        yield Case("validity", failure="; ".join(comparison.notes) or "nothing was measured")
    for row in comparison.rows:
        text = f"{row.metric}: {row.change}" + (f" ({row.note})" if row.note else "")
        yield Case(
            row.metric,
            failure=text if row.verdict == "regress" else "",
            skipped=f"inconclusive: {text}" if row.verdict == "inconclusive" else "",
            text=text,
        )


def run_cases(records: Records, bounds: Iterable[Bound]) -> Iterator[Case]:
    """A case for the run's own verdict, and one per bound; a bound with too few samples is skipped."""
    reasons = "; ".join(records.reasons) or VERDICT_WORDS[records.verdict]
    yield Case("validity", failure=reasons if records.verdict == "client_limited" else "", text=reasons)
    summary = Summary(records)
    for bound in bounds:
        try:
            value = summary.value(bound.metric, bound.cls)
        except FigureError as error:
            yield Case(str(bound), failure=str(error))
            continue
        text = f"{bound}: {format_value(bound.metric, value)}"
        if math.isnan(value):
            n = summary.count(bound.metric, bound.cls)
            yield Case(str(bound), skipped=f"{bound}: cannot tell from {n} samples")
        elif bound.violation(value) > 0:
            yield Case(str(bound), failure=f"missed {text}")
        else:
            yield Case(str(bound), text=f"met {text}")


def comparison_csv(comparison: Comparison) -> str:
    """One line per metric; seconds, rates or counts."""
    names = ("metric", "a", "b", "ratio", "low", "high", "p", "floor", "verdict", "note")
    return _csv(names, ([_cell(getattr(row, name)) for name in names] for row in comparison.rows))


def requests_csv(records: Records) -> str:
    """One line per request: times in seconds after the start."""
    table = frame(records)
    return str(table.to_csv()) if len(table) else ""


def github_benchmark(comparison: Comparison) -> list[dict[str, Any]]:
    """For github-action-benchmark with ``customSmallerIsBetter``: side B, rates as seconds per unit."""
    entries = []
    for row in _plottable(comparison):
        rate = rises(row.metric)
        half = (row.high - row.low) / 2 if math.isfinite(row.high) else math.nan
        entries.append(
            {
                "name": f"{row.metric} (1/x)" if rate else row.metric,
                "unit": "s" if not rate else "s per unit",
                "value": 1 / row.b if rate else row.b,
                "range": f"± {100 * half:.1f} %" if math.isfinite(half) else "",
                "extra": f"{row.change} against A; {row.verdict}",
            }
        )
    return entries


def bencher(comparison: Comparison, benchmark: str) -> dict[str, dict[str, dict[str, float]]]:
    """Bencher Metric Format: {benchmark: {measure: {value, lower_value, upper_value}}}, of side B."""
    measures = {}
    for row in _plottable(comparison):
        measure = {"value": row.b}
        if math.isfinite(row.high) and row.low > 0:
            measure |= {"lower_value": row.a * row.low, "upper_value": row.a * row.high}
        measures[row.metric] = measure
    return {benchmark: measures}


def run_benchmark(records: Records) -> dict[str, dict[str, dict[str, float]]]:
    """Bencher Metric Format of one run: its headline figures, with intervals where a run has them."""
    summary = Summary(records)
    measures = {}
    for name in _HEADLINES:
        value = summary.value(name)
        if math.isfinite(value):
            low, high = summary.interval(name)
            measure = {"value": value}
            if math.isfinite(low) and math.isfinite(high):
                measure |= {"lower_value": low, "upper_value": high}
            measures[name] = measure
    return {"vtune bench run": measures}


def _plottable(comparison: Comparison) -> Iterator[ComparedMetric]:
    for row in comparison.rows:
        name = split_metric(row.metric)[0]
        known = name in RATES or name.rpartition("_")[0] in METRICS
        if known and math.isfinite(row.b) and row.b > 0:
            yield row


def _csv(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(head)
    table.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    """Empty for what there is not; never a formula for a spreadsheet."""
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    text = str(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
