"""``vtune bench``: load a server and report. Light: heavy imports sit inside the commands."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import loadgen.compare_command
import loadgen.counters_command
import loadgen.record_command
import loadgen.simulate_command
import loadgen.sweep_command
import loadgen.trace_command
from loadgen.options import Connection, Load, with_options
from loadgen.terminal import (
    INTERRUPTED,
    INVALID,
    Format,
    check_writable,
    display,
    fail,
    interruptible,
)

if TYPE_CHECKING:
    from loadgen.record import Records


bench = typer.Typer(
    help="Load a server and measure what it does.", no_args_is_help=True, rich_markup_mode="rich"
)


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    loadgen.sweep_command.mount(bench)
    loadgen.compare_command.mount(bench)
    loadgen.counters_command.mount(bench)
    loadgen.record_command.mount(bench)
    loadgen.trace_command.mount(bench)
    app.add_typer(bench, name="bench")
    loadgen.simulate_command.mount(app)


@bench.command()
@with_options
def run(
    server: Connection,
    load: Load,
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, classes, lengths and prompts.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records.json, requests.jsonl, summary.json, report.md/.html."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records here.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline HTML report here.")
    ] = None,
    format: Annotated[Format, typer.Option(help="What is printed.")] = Format.TEXT,
) -> None:
    """Load a server for a while and print what it did, by request class.

    Examples:

      vtune bench run --url http://127.0.0.1:8000 --rate 2 --duration 60s

      vtune bench run --url http://127.0.0.1:8000 --concurrency 16 --num-requests 200 --workload random

      vtune bench run --url http://127.0.0.1:8000 --rate 4 --duration 2m --workload mixed --out runs/a

    Exit codes: 0 measured, 2 bad usage or server unreachable, 3 the measurement is invalid, 130 interrupted
    (what was measured is kept).
    """
    check_writable(out, json_file, html_file)
    try:
        load.check()
        server = server.asked()
        schedule = server.source(load)(seed)
        with interruptible() as stop, display(schedule) as show:
            records = server.run(schedule, show, stop)
    except (ConnectionError, ValueError) as error:
        fail(str(error))
    _write(records, out, json_file, html_file)
    _print(records, format)
    raise typer.Exit(_exit_code(records))


@bench.command()
def report(
    file: Annotated[Path, typer.Argument(help="Records written by `vtune bench run --json/--out`.")],
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline HTML report here.")
    ] = None,
    format: Annotated[Format, typer.Option(help="What is printed.")] = Format.TEXT,
) -> None:
    """Print a saved run again.

    Examples:

      vtune bench report runs/a/records.json

      vtune bench report runs/a/records.json --format markdown --html report.html
    """
    from loadgen.record import Records, RecordsError

    try:
        records = Records.load(file / "records.json" if file.is_dir() else file)
    except RecordsError as error:
        fail(str(error))
    _write(records, None, None, html_file)
    _print(records, format)


def _exit_code(records: Records) -> int:
    if records.partial:
        return INTERRUPTED
    nothing = not any(record.ok for record in records.requests)
    return INVALID if nothing or records.verdict == "client_limited" else 0


def _write(records: Records, out: Path | None, json_file: Path | None, html_file: Path | None) -> None:
    from loadgen import report as reports
    from loadgen.record import write_atomically

    pages = [html_file] if html_file else []
    try:
        if json_file:
            records.save(json_file)
        if out:
            records.save(out / "records.json")
            records.save_requests(out / "requests.jsonl")
            write_atomically(out / "summary.json", [json.dumps(reports.to_json(records), indent=2), "\n"])
            write_atomically(out / "report.md", [reports.markdown(records)])
            pages.append(out / "report.html")
        if pages:
            from loadgen.html import html

            page = html(records)
            for path in pages:
                write_atomically(path, [page])
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}")


def _print(records: Records, format: Format) -> None:
    from loadgen import report as reports

    try:
        if format is Format.JSON:
            typer.echo(json.dumps(reports.to_json(records), indent=2))
        elif format is Format.MARKDOWN:
            typer.echo(reports.markdown(records))
        else:
            reports.print_report(records, sys.stdout)
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
