"""A run as text, Markdown and JSON. The HTML page is in ``loadgen.output.run_page``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.record import Records
from loadgen.measure.run_validity import VERDICT_WORDS
from loadgen.measure.stats import COUNTS, DEFINITIONS, METRICS, PARTS, RATES, Summary
from loadgen.output.escape import printable

SCHEMA = "vtune.bench/1"
_WIDTH = 132
"""Columns that the tables need."""
SUFFIXES = ("mean", "p50", "p90", "p95", "p99")
SHOWN_METRICS = ("ttft", "tpot", "itl", "inter_chunk", "max_stall", "e2e")
"""The headline metrics, given for every class; service latencies and lateness once, for all."""
SERVICE = ("service_ttft", "service_e2e", "lateness")
METRIC_NAMES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL per token",
    "inter_chunk": "ITL per chunk",
    "max_stall": "max stall",
    "e2e": "E2E",
    "service_ttft": "service TTFT",
    "service_e2e": "service E2E",
    "lateness": "send lateness",
    "queue": "in the queue",
    "prefill": "in prefill",
    "elsewhere": "elsewhere",
}


def duration(seconds: float, count: int | None = None) -> str:
    """Three digits and a unit; what the sample is too small for is "n/a (n=…)"."""
    if math.isnan(seconds):
        return "n/a" if count is None else f"n/a (n={count})"
    if math.isinf(seconds):
        return "∞"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{_three(seconds * 1e3)} ms"
    return f"{_three(seconds)} s"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def number(value: float) -> str:
    return "n/a" if math.isnan(value) else _three(value) if value >= 0.01 or value == 0 else f"{value:.2g}"


def interval(low: float, high: float) -> str:
    """Empty where there is none."""
    return "" if math.isnan(low) else f"{duration(low)} … {duration(high)}"


def groups(summary: Summary) -> list[str | None]:
    """All requests, then each class if there are several."""
    return [None, *summary.classes] if len(summary.classes) > 1 else [None]


def latency_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """(class, metric, mean, p50, p90, p95, p99, 95 % interval of p50, of p99), as text."""
    for cls in groups(summary):
        for metric in SHOWN_METRICS if cls is not None else SHOWN_METRICS + SERVICE:
            count = summary.count(f"{metric}_p50", cls)
            yield (
                cls or "all",
                METRIC_NAMES[metric],
                *(duration(summary.value(f"{metric}_{suffix}", cls), count) for suffix in SUFFIXES),
                interval(*summary.interval(f"{metric}_p50", cls)),
                interval(*summary.interval(f"{metric}_p99", cls)),
            )


def part_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """(class, part of TTFT, share of it, mean, p50, p90, p95, p99), as text; nothing where no server told."""
    if not summary.count("queue_p50"):
        return
    for cls in groups(summary):
        whole = sum(summary.value(f"{part}_mean", cls) for part in PARTS)
        for part in PARTS:
            mean, count = summary.value(f"{part}_mean", cls), summary.count(f"{part}_p50", cls)
            figures = (duration(summary.value(f"{part}_{suffix}", cls), count) for suffix in SUFFIXES)
            share = "n/a" if math.isnan(mean) else f"{max(0.0, mean / whole):.0%}"
            yield (cls or "all", METRIC_NAMES[part], share, *figures)


def rate_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    """(class, measured, completed, failed, output tok/s, req/s, offered req/s, goodput req/s), as text."""
    for cls in groups(summary):
        counts = (f"{summary.value(name, cls):,.0f}" for name in ("measured", "completed", "failed"))
        rates = (
            number(summary.value(name, cls))
            for name in ("throughput", "request_rate", "offered_rate", "goodput")
        )
        yield (cls or "all", *counts, *rates)


RATE_HEADS = ("class", "measured", "completed", "failed", "output tok/s", "req/s", "offered", "goodput")
PART_HEADS = ("class", "TTFT went", "share", "mean", "p50", "p90", "p95", "p99")
LATENCY_HEADS = ("class", "", "mean", "p50", "p90", "p95", "p99", "p50 95% CI", "p99 95% CI")


def facts(records: Records) -> list[tuple[str, str]]:
    """What was run, in lines of (name, value)."""
    low, high = records.window
    client, environment = records.client, records.environment
    busy = client.cpu / max(client.wall, 1e-9)
    lag = f"loop lag p99 {duration(client.lag_p99)}, max {duration(client.lag_max)}"
    schedule = (
        f"sha256 {records.schedule_sha256[:16]}, {records.planned} requests planned, {records.mode} loop"
    )
    return [
        ("server", f"{environment.get('url', '?')}, model {environment.get('model', '?')}"),
        ("workload", records.schedule),
        ("schedule", schedule),
        ("window", f"{low:.2f} to {high:.2f} s" + ("" if records.steady else " (the whole run)")),
        ("assumed", str(environment["estimate"]))
        if "estimate" in environment
        else ("client", f"{client.loop}, {client.workers} process(es), {busy:.1%} of a core, {lag}"),
    ]


def run_text(records: Records) -> RenderableType:
    """For a rich console."""
    summary = Summary(records)
    parts: list[RenderableType] = [
        Text.assemble((f"{name:<9}", "dim"), printable(value)) for name, value in facts(records)
    ]
    parts += [
        text_table(heads, rows, left=1 if heads is RATE_HEADS else 2) for heads, rows in _tables(summary)
    ]
    colour = "green" if records.verdict == "ok" else "yellow"
    parts.append(Text.assemble("verdict  ", (VERDICT_WORDS[records.verdict], f"bold {colour}")))
    parts += [Text(f"  - {printable(reason)}") for reason in records.reasons]
    parts += [Text(f"{METRIC_NAMES[name]}: {DEFINITIONS[name]}", style="dim") for name in SHOWN_METRICS]
    parts.append(Text(_FOOTNOTE, style="dim"))
    return Group(*parts)


_FOOTNOTE = (
    "Failures count as ∞ in percentiles; means are over what completed. n/a: too few samples for that "
    "percentile. ES95, ES99: expected shortfall, the mean of the slowest 5 or 1 % of the samples. SLOs on "
    "`itl` use the per-token definition."
)


def text_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Table:
    """The first ``left`` columns are text; what repeats in the first one is left out."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="left" if i < left else "right", no_wrap=True)
    previous = None
    for row in rows:
        shown = ("" if i == 0 and cell == previous else cell for i, cell in enumerate(row))
        table.add_row(*(Text(printable(cell)) for cell in shown))
        previous = row[0]
    return table


def print_run(records: Records, file: IO[str]) -> None:
    """Print :func:`run_text`; wide enough for its tables where there is no terminal."""
    wide_console(file).print(run_text(records))


def wide_console(file: IO[str]) -> Console:
    """For tables of up to 132 columns, in colour on a terminal; prints markup as it stands."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.width < _WIDTH:
        plain = not console.is_terminal
        console = Console(file=file, highlight=False, markup=False, emoji=False, width=_WIDTH, no_color=plain)
    return console


def run_markdown(records: Records) -> str:
    """Fits a CI job's summary."""
    from loadgen.output.page import render

    values = report_values(records, Summary(records))
    shown = [(METRIC_NAMES[name], DEFINITIONS[name]) for name in SHOWN_METRICS]
    return render("run.md.j2", **{**values, "definitions": shown}, footnote=_FOOTNOTE)


def report_values(records: Records, summary: Summary) -> dict[str, Any]:
    """What the templates of a run show."""
    return {
        "verdict": VERDICT_WORDS[records.verdict],
        "reasons": records.reasons,
        "facts": facts(records),
        "tables": [(heads, list(rows)) for heads, rows in _tables(summary)],
        "environment": records.environment,
        "definitions": [(METRIC_NAMES.get(name, name), text) for name, text in DEFINITIONS.items()],
    }


def _tables(summary: Summary) -> Iterator[tuple[tuple[str, ...], Iterator[tuple[str, ...]]]]:
    """(headings, rows); the parts of TTFT where a server told them."""
    yield RATE_HEADS, rate_rows(summary)
    yield LATENCY_HEADS, latency_rows(summary)
    if summary.count("queue_p50"):
        yield PART_HEADS, part_rows(summary)


def run_json(records: Records) -> dict[str, Any]:
    """Every figure as {"value", "n", "low", "high"}: seconds, rates or counts; null is "too few samples",
    "inf" that failures reach it."""
    summary = Summary(records)
    return {
        "schema": SCHEMA,
        "verdict": records.verdict,
        "reasons": list(records.reasons),
        "partial": records.partial,
        "window": list(records.window),
        "mode": records.mode,
        "schedule": records.schedule,
        "schedule_sha256": records.schedule_sha256,
        "environment": dict(records.environment),
        "definitions": dict(DEFINITIONS),
        "classes": {
            cls or "all": {name: _figure(summary, name, cls) for name in _figure_names()}
            for cls in groups(summary)
        },
    }


def _figure_names() -> Iterator[str]:
    yield from COUNTS
    yield from RATES
    for metric in METRICS:
        yield from (f"{metric}_{suffix}" for suffix in SUFFIXES)


def _figure(summary: Summary, name: str, cls: str | None) -> dict[str, float | str | int | None]:
    low, high = summary.interval(name, cls)
    return {
        "value": _plain(summary.value(name, cls)),
        "n": summary.count(name, cls),
        "low": _plain(low),
        "high": _plain(high),
    }


def _plain(value: float) -> float | str | None:
    return None if math.isnan(value) else "inf" if math.isinf(value) else value
