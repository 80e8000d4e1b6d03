"""What other tools' results state, in the formats of a run's report, and what they cannot say."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from rich.text import Text

from loadgen.foreign.result import METRICS, RATES, STATISTICS, StatedResult
from loadgen.output.escape import markdown_text, printable
from loadgen.output.junit import Case
from loadgen.output.report import METRIC_NAMES, duration, number, text_table, wide_console
from servers.slo.bounds import Bound, format_value

SCHEMA = "vtune.stated/1"
_NAMES = {**METRIC_NAMES, "e2e_per_token": "E2E per token"}
_KIN = ("itl", "inter_chunk", "tpot")
"""What tools call inter-token latency."""
_RATE_HEADS = ("run", "load", "completed", "failed", "seconds", "output tok/s", "req/s")
_LATENCY_HEADS = ("run", "", "mean", "p50", "p90", "p95", "p99")


def print_stated(results: Sequence[StatedResult], file: IO[str]) -> None:
    """Two tables, and below them what the files mean and cannot say."""
    console = wide_console(file)
    console.print(Text(f"As stated by {_tools(results)}; their requests are not in the file."))
    for result in _titled(results):
        console.print(Text(printable(result)))
    console.print(text_table(_RATE_HEADS, rate_rows(results), left=2))
    console.print(text_table(_LATENCY_HEADS, latency_rows(results), left=2))
    for line in remarks(results):
        console.print(Text(f"  - {printable(line)}"))


def stated_markdown(results: Sequence[StatedResult]) -> str:
    """Fits a CI job's summary."""
    lines = [f"As stated by {markdown_text(_tools(results))}; their requests are not in the file.", ""]
    lines += [f"- {markdown_text(title)}" for title in _titled(results)]
    for heads, rows in ((_RATE_HEADS, rate_rows(results)), (_LATENCY_HEADS, latency_rows(results))):
        lines += ["", _line(heads), _line("---" for _ in heads)]
        lines += [_line(map(markdown_text, row)) for row in rows]
    return "\n".join([*lines, "", *(f"- {markdown_text(line)}" for line in remarks(results))])


def stated_json(results: Sequence[StatedResult]) -> dict[str, Any]:
    """Seconds, rates and counts; null for what is not stated."""
    return {
        "schema": SCHEMA,
        "results": [
            {
                "tool": result.tool,
                "file": result.origin,
                "model": result.model,
                "load": str(result.asked),
                "seconds": result.seconds,
                "completed": result.completed,
                "failed": result.failed,
                "prompt_tokens_mean": result.prompt_tokens,
                "output_tokens_mean": result.output_tokens,
                "figures": dict(result.figures),
                "faults": list(result.faults),
                "cannot_say": list(result.limits),
            }
            for result in results
        ],
    }


def stated_csv(results: Sequence[StatedResult]) -> str:
    """One line per run and figure; seconds, rates or counts."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("run", "figure", "value"))
    for run, result in enumerate(results, 1):
        counts = (("completed", result.completed), ("failed", result.failed))
        stated = [(name, value) for name, value in (*counts, *result.figures.items()) if value is not None]
        table.writerows((run, name, repr(value)) for name, value in stated)
    return text.getvalue().rstrip("\n")


def stated_bencher(results: Sequence[StatedResult]) -> dict[str, dict[str, dict[str, float]]]:
    """Bencher Metric Format, a benchmark per run."""
    return {
        _run_name(results, run): {name: {"value": value} for name, value in result.figures.items()}
        for run, result in enumerate(results)
    }


def stated_cases(results: Sequence[StatedResult], bounds: Iterable[Bound]) -> Iterator[Case]:
    """A case per run for what is wrong with it, and one per bound; what is not stated is skipped."""
    bounds = tuple(bounds)
    for run, result in enumerate(results):
        name = _run_name(results, run)
        yield Case(f"{name}: validity", failure="; ".join(result.faults))
        for bound in bounds:
            yield _case(f"{name}: {bound}", result, bound)


def _case(name: str, result: StatedResult, bound: Bound) -> Case:
    value = result.value(bound.metric) if bound.cls is None else math.nan
    if math.isnan(value):
        family = bound.metric.rpartition("_")[0]
        kin = _KIN if family in _KIN else (family,)
        near = [figure for figure in result.figures if figure.rpartition("_")[0] in kin]
        stated = f"it states {', '.join(near)}" if near else f"it states nothing of {family or bound.metric}"
        return Case(name, skipped=f"{name}: cannot tell, {stated}")
    text = f"{name}: {format_value(bound.metric, value)}"
    missed = bound.violation(value) > 0
    return Case(name, failure=f"missed {text}") if missed else Case(name, text=f"met {text}")


def rate_rows(results: Sequence[StatedResult]) -> Iterator[tuple[str, ...]]:
    """(run, load, completed, failed, seconds, output tok/s, req/s), as text."""
    for run, result in enumerate(results, 1):
        counts = (result.completed, result.failed, result.seconds)
        yield (
            str(run),
            str(result.asked),
            *("not stated" if count is None else f"{count:,.6g}" for count in counts),
            *(_rate(result.value(name)) for name in RATES[:2]),
        )


def latency_rows(results: Sequence[StatedResult]) -> Iterator[tuple[str, ...]]:
    """(run, metric, mean, p50, p90, p95, p99), as text; metrics of which nothing is stated are left out."""
    for run, result in enumerate(results, 1):
        for metric in METRICS:
            values = [result.value(f"{metric}_{statistic}") for statistic in STATISTICS]
            if not all(map(math.isnan, values)):
                cells = ("" if math.isnan(value) else duration(value) for value in values)
                yield (str(run), _NAMES[metric], *cells)


def remarks(results: Sequence[StatedResult]) -> Iterator[str]:
    """Faults, rates that were not reached, and what cannot be said; each once, with its runs."""
    said: dict[str, list[str]] = {}
    for run, result in enumerate(results, 1):
        reached = result.value("request_rate")
        short = [f"reached {reached:.3g} of {result.asked.rate:g} req/s"] if result.rate_share < 0.9 else []
        for line in (*(f"invalid: {fault}" for fault in result.faults), *short, *result.limits):
            said.setdefault(line, []).append(str(run))
    for line, runs in said.items():
        yield line if len(runs) == len(results) else f"run {', '.join(runs)}: {line}"


def _titled(results: Sequence[StatedResult]) -> Iterator[str]:
    for run, result in enumerate(results, 1):
        tokens = [
            f"{mean:,.0f} {name} tokens"
            for name, mean in (("prompt", result.prompt_tokens), ("output", result.output_tokens))
            if mean is not None
        ]
        facts = [f"model {result.model}"] * bool(result.model) + tokens
        yield f"run {run}: {result.origin}" + (f" ({', '.join(facts)})" if facts else "")


def _tools(results: Sequence[StatedResult]) -> str:
    return " and ".join(dict.fromkeys(result.tool for result in results))


def _run_name(results: Sequence[StatedResult], run: int) -> str:
    return results[run].tool if len(results) == 1 else f"{results[run].tool}, run {run + 1}"


def _rate(value: float) -> str:
    return "not stated" if math.isnan(value) else number(value)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
