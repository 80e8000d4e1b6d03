"""``vtune bench sweep``: the curve over loads, its knee, the highest that meets an SLO. Light to import."""

from __future__ import annotations

import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.commands.options import Load, with_options
from loadgen.commands.server_options import Server
from loadgen.output.terminal import FAILED, INTERRUPTED, Format, check_writable, interruptible
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.measure.sweep import Capacity, Level

SCHEMA = "vtune.sweep/1"


class OverKind(StrEnum):
    """What is varied."""

    RATE = "rate"
    CONCURRENCY = "concurrency"


def levels(text: str) -> tuple[float, ...]:
    """``1,2,4,8``. Raises typer.BadParameter."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 < value < math.inf for value in values):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers: write e.g. 1,2,4,8")
    return values


def mount(bench: typer.Typer) -> None:
    """Add the command to ``bench``."""
    bench.command()(sweep)


@with_options
def sweep(
    server: Server,
    load: Load,
    over: Annotated[OverKind, typer.Option(help="What is varied.")] = OverKind.RATE,
    slo: Annotated[
        str | None,
        typer.Option(help="Find the highest level that meets these bounds, e.g. itl_p99<50ms,ttft_p95<1s."),
    ] = None,
    at: Annotated[
        Any, typer.Option(parser=levels, metavar="N,N,…", help="Measure exactly these levels, e.g. 1,2,4,8.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each level of --at.")] = 2,
    max_runs: Annotated[int, typer.Option(min=1, help="Maximum number of runs per level.")] = 5,
    tolerance: Annotated[
        float, typer.Option(min=0.001, max=1.0, help="How close to find the highest level, relative.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the first run; each run has its own.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for sweep.json and every run's records.")] = None,
    format: Annotated[Format, typer.Option(help="What is printed.")] = Format.TEXT,
) -> None:
    """Measure a server at several levels of load.

    With --slo it searches the highest level that meets the bounds: it doubles or halves from --rate (or
    --concurrency), then bisects, and runs a level again until an interval over its runs lies on one side of
    every bound. With --at it measures just the levels given. Either way it marks the knee.

    Examples:

      vtune bench sweep --url http://127.0.0.1:8000 --slo itl_p99<50ms,ttft_p95<1s --rate 2 --duration 60s

      vtune bench sweep --url http://127.0.0.1:8000 --over concurrency --at 1,4,16 --num-requests 64

    Exit codes: 0 found, 1 no level meets the bounds, 2 bad usage or server unreachable, 3 invalid
    measurement, 130 interrupted.
    """
    from loadgen.measure.sweep import Sweep, SweepError
    from servers.slo.bounds import parse_bounds

    if (slo is None) == (at is None):
        raise UserError("give --slo (search the highest load that meets it) or --at (measure these levels)")
    start = (load.rate if over is OverKind.RATE else load.concurrency) or (at[0] if at else None)
    if start is None:
        raise UserError(f"give --{over.value}: where the search starts")
    check_writable(out)
    number = 0

    def measure(level: float, seed_of_run: int) -> Any:
        nonlocal number
        asked = load.at_level(over.value, level)
        records = server.run(server.source(asked)(seed_of_run), stop=stop)
        number += 1
        if out:
            records.save(out / f"run-{number:03d}-{over.value}-{level:g}.json")
        return records

    def told(level: float, run: int) -> None:
        typer.echo(f"{over.value} {level:g}, run {run}", err=True)

    try:
        load.at_level(over.value, start).check()
        bounds = parse_bounds(slo) if slo else ()
        server = server.asked()
        with interruptible() as stop:
            search = Sweep(
                measure, bounds, over=over.value, seed=seed, max_runs=max_runs, stop=stop.is_set, told=told
            )
            found = search.curve(at, repeats) if at else search.highest(start, tolerance)
    except SweepError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(3) from None
    _show(found, format, out)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
    if bounds and found.best is None:
        raise typer.Exit(FAILED)


def _show(found: Capacity, format: Format, out: Path | None) -> None:
    from servers.files import write_atomically

    answer = sweep_json(found)
    if out:
        write_atomically(out / "sweep.json", [json.dumps(answer, indent=2), "\n"])
    if format is Format.JSON:
        typer.echo(json.dumps(answer, indent=2))
    elif format is Format.MARKDOWN:
        from loadgen.output.page import render

        heads, *rows = sweep_table(found)
        typer.echo(render("table.md.j2", heads=heads, rows=rows, lines=conclusions(found)), nl=False)
    else:
        _print(found)


def _print(found: Capacity) -> None:
    from loadgen.output.report import text_table as grid
    from loadgen.output.report import wide_console

    heads, *rows = sweep_table(found)
    console = wide_console(sys.stdout)
    console.print(grid(heads, rows, left=0))
    for line in conclusions(found):
        console.print(line)


def sweep_table(found: Capacity) -> list[tuple[str, ...]]:
    """Headings, then one row per level: medians over its runs, and the interval of every bounded figure."""
    from loadgen.output.report import duration, number
    from servers.slo.bounds import format_value

    bounds = [estimate.bound for estimate in found.levels[0].estimates] if found.levels else []
    head = (
        *(found.over, "runs", "tok/s", "req/s", "TTFT p50", "TTFT p95", "TPOT p50", "ITL p99"),
        *(str(bound) for bound in bounds),
        "",
    )
    rows = [head]
    for level in found.levels:
        rates = (number(level.figure(name)) for name in ("throughput", "request_rate"))
        latencies = (duration(level.figure(f)) for f in ("ttft_p50", "ttft_p95", "tpot_p50", "itl_p99"))
        estimates = (
            f"{format_value(e.bound.metric, e.low)} … {format_value(e.bound.metric, e.high)}"
            for e in level.estimates
        )
        row = (f"{level.value:g}", str(len(level.runs)), *rates, *latencies, *estimates, _mark(found, level))
        rows.append(row)
    return rows


def _mark(found: Capacity, level: Level) -> str:
    words: list[str] = [level.decision] if level.estimates else []
    words += ["saturated"] * level.saturated + ["knee"] * (found.knee is level)
    return ", ".join(words)


def conclusions(found: Capacity) -> list[str]:
    """What the levels say, in sentences."""
    lines = []
    unit = "requests/s" if found.over == "rate" else "in flight"
    bounded = any(level.estimates for level in found.levels)
    if bounded and found.best is not None:
        edge = found.limit
        beyond = f"; {edge.value:g} {_why(edge)}" if edge else "; no higher level was tried"
        lines.append(f"Highest level shown to meet the bounds: {found.best.value:g} {unit}{beyond}.")
    elif bounded:
        lines.append(f"No level is shown to meet the bounds; the lowest tried was {found.levels[0].value:g}.")
    if found.knee is not None:
        lines.append(f"Knee (throughput / mean response time is largest): {found.knee.value:g} {unit}.")
    return lines


def _why(level: Level) -> str:
    if level.saturated:
        return "is more than the server can serve"
    missed = [estimate.bound.name for estimate in level.estimates if estimate.decision == level.decision]
    verb = "misses" if level.decision == "missed" else "is not shown to meet"
    return f"{verb} {', '.join(missed)}"


def sweep_json(found: Capacity) -> dict[str, Any]:
    """Plain values; a figure that a level has too few samples for is null."""

    def plain(value: float) -> float | str | None:
        return None if math.isnan(value) else "inf" if math.isinf(value) else value

    return {
        "schema": SCHEMA,
        "over": found.over,
        "best": found.best.value if found.best else None,
        "limit": found.limit.value if found.limit else None,
        "knee": found.knee.value if found.knee else None,
        "tolerance": found.tolerance,
        "interrupted": found.interrupted,
        "levels": [
            {
                "level": level.value,
                "decision": level.decision if level.estimates else None,
                "saturated": level.saturated,
                "runs": len(level.runs),
                **{
                    name: plain(level.figure(name))
                    for name in ("throughput", "request_rate", "ttft_p50", "ttft_p95", "tpot_p50", "itl_p99")
                },
                "bounds": [
                    {
                        "bound": str(estimate.bound),
                        "value": plain(estimate.value),
                        "low": plain(estimate.low),
                        "high": plain(estimate.high),
                        "decision": estimate.decision,
                    }
                    for estimate in level.estimates
                ],
            }
            for level in found.levels
        ],
    }
