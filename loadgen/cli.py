"""``vtune bench``: load a server and report. Light: heavy imports sit inside the commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands import (
    compare_command,
    counters_command,
    record_command,
    simulate_command,
    sweep_command,
    trace_command,
)
from loadgen.commands.options import Load, with_options
from loadgen.commands.server_options import Server
from loadgen.commands.stated import is_stated, report_stated
from loadgen.output.terminal import (
    FAILED,
    INTERRUPTED,
    INVALID,
    check_writable,
    display,
    interruptible,
)
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.measure.record import Records
    from servers.slo.bounds import Bound


class RunFormat(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    CSV = "csv"
    JUNIT = "junit"
    BENCHER = "bencher"


_FILES = {
    "summary.json": RunFormat.JSON,
    "report.md": RunFormat.MARKDOWN,
    "requests.csv": RunFormat.CSV,
    "junit.xml": RunFormat.JUNIT,
    "bencher.json": RunFormat.BENCHER,
}
"""Written to a run's folder, beside its records and the page."""

bench = typer.Typer(help="Load a server and measure what it does.", no_args_is_help=True)


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    sweep_command.mount(bench)
    compare_command.mount(bench)
    counters_command.mount(bench)
    record_command.mount(bench)
    trace_command.mount(bench)
    app.add_typer(bench, name="bench")
    simulate_command.mount(app)


@bench.command()
@with_options
def run(
    server: Server,
    load: Load,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of arrivals, classes, lengths and prompts.")
    ] = 0,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Bounds that a gate asks for, e.g. itl_p99<50ms,ttft_p95<1s; a missed one exits with 1."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the records and the report in every format.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records here.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline HTML report here.")
    ] = None,
    format: Annotated[RunFormat, typer.Option(help="What is printed.")] = RunFormat.TEXT,
) -> None:
    """Load a server for a while and print what it did, by request class.

    Examples:

      vtune bench run --url http://127.0.0.1:8000 --rate 2 --duration 60s

      vtune bench run --url http://127.0.0.1:8000 --concurrency 16 --num-requests 200 --workload random

      vtune bench run --url http://127.0.0.1:8000 --rate 4 --duration 2m --workload mixed --out runs/a

      vtune bench run --url http://127.0.0.1:8000 --rate 4 --duration 2m --slo itl_p99<50ms --format junit

    Exit codes: 0 measured, 1 a bound of --slo is missed, 2 bad usage or server unreachable, 3 the measurement
    is invalid, 130 interrupted (what was measured is kept).
    """
    from servers.slo.bounds import parse_bounds

    check_writable(out, json_file, html_file)
    bounds = parse_bounds(slo) if slo else ()
    load.check()
    server = server.asked()
    schedule = server.source(load)(seed)
    with interruptible() as stop, display(schedule) as show:
        records = server.run(schedule, show, stop)
    _write(records, bounds, out, json_file, html_file)
    missed = _print(records, bounds, format)
    raise typer.Exit(_exit_code(records) or (FAILED if missed else 0))


@bench.command()
def report(
    file: Annotated[
        Path,
        typer.Argument(
            help="Records written by `vtune bench run --json/--out`, or results of vllm bench serve, SGLang, "
            "GuideLLM, AIPerf, genai-bench, LLMPerf or inference-perf."
        ),
    ],
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline HTML report here.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Bounds to hold it against; a missed one exits with 1.")
    ] = None,
    format: Annotated[RunFormat, typer.Option(help="What is printed.")] = RunFormat.TEXT,
) -> None:
    """Print a saved run again, or what another tool's file states, and what it cannot say.

    Examples:

      vtune bench report runs/a/records.json

      vtune bench report runs/a/records.json --format markdown --html report.html

      vtune bench report runs/a --slo itl_p99<50ms --format junit

      vtune bench report vllm-bench.json --slo ttft_p99<2s

    Exit codes: 0 printed, 1 a bound of --slo is missed, 2 no saved run.
    """
    from loadgen.measure.record import Records
    from servers.slo.bounds import parse_bounds

    bounds = parse_bounds(slo) if slo else ()
    if is_stated(file):
        if html_file:
            raise UserError(f"--html: {file} holds figures without requests; use --format markdown")
        raise typer.Exit(FAILED if report_stated(file, bounds, format.value) else 0)
    records = Records.load(file / "records.json" if file.is_dir() else file)
    _write(records, bounds, None, None, html_file)
    if _print(records, bounds, format):
        raise typer.Exit(FAILED)


def _exit_code(records: Records) -> int:
    if records.partial:
        return INTERRUPTED
    nothing = not any(record.ok for record in records.requests)
    return INVALID if nothing or records.verdict == "client_limited" else 0


def _write(
    records: Records,
    bounds: Sequence[Bound],
    out: Path | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    from servers.files import write_atomically

    pages = [html_file] if html_file else []
    try:
        if json_file:
            records.save(json_file)
        if out:
            records.save(out / "records.json")
            records.save_requests(out / "requests.jsonl")
            for name, format in _FILES.items():
                write_atomically(out / name, [_formatted(records, bounds, format), "\n"])
            pages.append(out / "report.html")
        if pages:
            from loadgen.output.run_page import run_page

            page = run_page(records)
            for path in pages:
                write_atomically(path, [page])
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None


def _print(records: Records, bounds: Sequence[Bound], format: RunFormat) -> bool:
    """Whether a bound is missed."""
    from loadgen.output.exports import run_cases
    from loadgen.output.report import print_run

    cases = list(run_cases(records, bounds)) if bounds else []
    try:
        if format is RunFormat.TEXT:
            print_run(records, sys.stdout)
            for case in cases:
                typer.echo(f"SLO      {case.failure or case.skipped or case.text}")
        else:
            typer.echo(_formatted(records, bounds, format))
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return any(case.failure for case in cases)


def _formatted(records: Records, bounds: Sequence[Bound], format: RunFormat) -> str:
    """One of the formats that are no tables for a terminal."""
    from loadgen.output import exports, junit, report

    match format:
        case RunFormat.MARKDOWN:
            return report.run_markdown(records).rstrip("\n")
        case RunFormat.CSV:
            return exports.requests_csv(records).rstrip("\n")
        case RunFormat.JUNIT:
            return junit.junit(exports.run_cases(records, bounds), "vtune bench run").rstrip("\n")
        case RunFormat.BENCHER:
            return json.dumps(exports.run_benchmark(records), indent=2)
        case _:
            return json.dumps(report.run_json(records), indent=2)
