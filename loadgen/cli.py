"""``vtune bench``: load a server and report. Light: heavy imports sit inside the commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from loadgen.options import Load, seconds, with_load

if TYPE_CHECKING:
    from loadgen.record import Records
    from loadgen.wire import Progress
    from loadgen.workload import Schedule

UNUSABLE, INVALID, INTERRUPTED = 2, 3, 130
_DEFAULT_CONTEXT = 4096
_PLAIN_EVERY = 10.0

bench = typer.Typer(
    help="Load a server and measure what it does.", no_args_is_help=True, rich_markup_mode="rich"
)


class Format(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(bench, name="bench")


@bench.command()
@with_load
def run(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")],
    load: Load,
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, classes, lengths and prompts.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Default: what /v1/models says.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=8, help="Prompts use token ids below this. Default: 32000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VTUNE_API_KEY", help="Sent as bearer token.")] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Unmeasured requests first. Default: one of each class.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(parser=seconds, metavar="TIME", help="For one request, to its last byte.")
    ] = 600.0,
    drain: Annotated[
        float | None,
        typer.Option(
            parser=seconds,
            metavar="TIME",
            help="Wait for answers after the last request. Default: --timeout.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    chunk_usage: Annotated[
        bool, typer.Option("--chunk-usage", help="Ask for token counts in each chunk (vLLM, SGLang).")
    ] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the TLS certificate.")] = False,
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
    from loadgen.client import ClientOptions, run_schedule

    _check_writable(out, json_file, html_file)
    options = ClientOptions(
        timeout=timeout, drain=drain, workers=workers, verify_tls=not insecure, chunk_usage=chunk_usage
    )
    try:
        load.check()
        model, max_model_len = served(url, model, max_model_len, api_key, verify=not insecure)
        schedule = load.source(max_model_len, vocab_size, warmup)(seed)
        with _interruptible() as stop, _display(schedule) as show:
            records = run_schedule(
                url, schedule, model=model, api_key=api_key, progress=show, stop=stop, options=options
            )
    except (ConnectionError, ValueError) as error:
        _fail(str(error))
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
        _fail(str(error))
    _write(records, None, None, html_file)
    _print(records, format)


def served(
    url: str, model: str | None, max_model_len: int | None, api_key: str | None, *, verify: bool
) -> tuple[str, int]:
    """The model to ask for and its context, as given, else as the server says.

    Raises Unreachable, ValueError.
    """
    from loadgen.probe import Url, probe

    if model is None or max_model_len is None:
        info = probe(Url.parse(url), api_key=api_key, verify=verify)
        model, max_model_len = model or info.model, max_model_len or info.max_model_len or _DEFAULT_CONTEXT
    return model, max_model_len


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(UNUSABLE)


def _exit_code(records: Records) -> int:
    if records.partial:
        return INTERRUPTED
    nothing = not any(record.ok for record in records.requests)
    return INVALID if nothing or records.verdict == "client_limited" else 0


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that the run ends with what it has; a second one ends the program."""
    stop = threading.Event()

    def on_signal(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _display(schedule: Schedule) -> Iterator[Callable[[Progress], None]]:
    """A progress bar on stderr; a line every ten seconds where that is no terminal."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    timed = schedule.duration is not None
    total = schedule.duration if timed else len(schedule.requests)
    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("warming up", total=total)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                completed=max(0.0, progress.elapsed) if timed else progress.finished,
                description=_counts(progress),
            )

        yield show


def _plain_progress() -> Callable[[Progress], None]:
    due = 0.0

    def show(progress: Progress) -> None:
        nonlocal due
        if progress.elapsed >= due:
            due += _PLAIN_EVERY
            typer.echo(f"{progress.elapsed:6.0f} s  {_counts(progress)}", err=True)

    return show


def _counts(progress: Progress) -> str:
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.sent} sent, {progress.in_flight} in flight, {progress.finished} done{failed}"


def _check_writable(out: Path | None, *files: Path | None) -> None:
    """Before the run: a minute of load must not end in "permission denied"."""
    for folder in (out, *(file.parent for file in files if file)):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _fail(f"cannot write to {folder}: {error.strerror}")
        if not os.access(folder, os.W_OK):
            _fail(f"cannot write to {folder}: no permission")


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
        _fail(f"cannot write {error.filename}: {error.strerror}")


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
