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

if TYPE_CHECKING:
    from loadgen.arrivals import Arrival
    from loadgen.record import Records
    from loadgen.wire import Progress
    from loadgen.workload import Schedule

UNUSABLE, INVALID, INTERRUPTED = 2, 3, 130
_DEFAULT_CONTEXT = 4096
_PLAIN_EVERY = 10.0

bench = typer.Typer(
    help="Load a server and measure what it does.", no_args_is_help=True, rich_markup_mode="rich"
)


class ArrivalKind(StrEnum):
    """Names on the command line."""

    POISSON = "poisson"
    CONSTANT = "constant"
    GAMMA = "gamma"


class Format(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(bench, name="bench")


def _seconds(text: str | float) -> float:
    """``60``, ``60s``, ``1.5m``, ``500ms``, ``1h``. Raises typer.BadParameter."""
    if isinstance(text, float):
        return text
    for suffix, factor in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("", 1.0)):
        if text.endswith(suffix):
            try:
                value = float(text.removesuffix(suffix)) * factor
            except ValueError:
                break
            if 0 < value < float("inf"):
                return value
            break
    raise typer.BadParameter(f"{text!r} is no length of time: write e.g. 60s, 500ms or 2m")


def _positive(value: float | None) -> float | None:
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter("it must be a positive number")
    return value


@bench.command()
def run(
    url: Annotated[str, typer.Option(help="Base URL of an OpenAI-compatible server.")],
    rate: Annotated[
        float | None, typer.Option(callback=_positive, help="Open loop: requests a second.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: requests in flight; with --rate, a cap on them.")
    ] = None,
    duration: Annotated[
        float | None, typer.Option(parser=_seconds, metavar="TIME", help="How long to send: 60s, 2m.")
    ] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="How many requests to send.")] = None,
    arrival: Annotated[
        ArrivalKind, typer.Option(help="How open-loop requests arrive.")
    ] = ArrivalKind.POISSON,
    burstiness: Annotated[
        float | None,
        typer.Option(
            callback=_positive, help="Shape of gamma arrivals: below 1 bursts, 1 Poisson, above 1 even."
        ),
    ] = None,
    workload: Annotated[str, typer.Option(help="chat, rag, batch, mixed, random or shared-prefix.")] = "chat",
    input_len: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of a one-class workload.")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Output tokens of a one-class workload.")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            callback=_positive, help="Factor on prompt lengths; default: context / 32768, at most 1."
        ),
    ] = None,
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
        float, typer.Option(parser=_seconds, metavar="TIME", help="For one request, to its last byte.")
    ] = 600.0,
    drain: Annotated[
        float | None,
        typer.Option(
            parser=_seconds,
            metavar="TIME",
            help="Wait for answers after the last request. Default: --timeout.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Client processes.")] = 1,
    priorities: Annotated[
        bool, typer.Option("--priorities", help="Send the classes' priorities (needs priority scheduling).")
    ] = False,
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
    from loadgen.arrivals import ArrivalError
    from loadgen.client import ClientOptions, run_schedule
    from loadgen.probe import Unreachable, Url, probe
    from loadgen.workload import DEFAULT_VOCAB_SIZE, WorkloadError, preset

    process = _arrival(rate, concurrency, arrival, burstiness)
    if duration is None and num_requests is None:
        _fail("give --duration (e.g. 60s) or --num-requests (e.g. 200)")
    _check_writable(out, json_file, html_file)
    try:
        server = Url.parse(url)
        if model is None or max_model_len is None:
            info = probe(server, api_key=api_key, verify=not insecure)
            model, max_model_len = (
                model or info.model,
                max_model_len or info.max_model_len or _DEFAULT_CONTEXT,
            )
        load = preset(
            workload,
            max_model_len=max_model_len,
            vocab_size=vocab_size or DEFAULT_VOCAB_SIZE,
            input_len=input_len,
            output_len=output_len,
            scale=scale,
        )
        schedule = load.schedule(
            seed=seed,
            arrival=process,
            num_requests=num_requests,
            duration=duration,
            max_concurrency=concurrency if rate is not None else None,
            warmup=warmup,
            use_priority=priorities,
        )
        options = ClientOptions(
            timeout=timeout, drain=drain, workers=workers, verify_tls=not insecure, chunk_usage=chunk_usage
        )
        with _interruptible() as stop, _display(schedule) as show:
            records = run_schedule(
                url, schedule, model=model, api_key=api_key, progress=show, stop=stop, options=options
            )
    except (ArrivalError, WorkloadError, Unreachable, ValueError) as error:
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


def _arrival(
    rate: float | None, concurrency: int | None, kind: ArrivalKind, burstiness: float | None
) -> Arrival:
    from loadgen.arrivals import ClosedLoop, Constant, Gamma, Poisson

    if rate is None:
        if concurrency is None:
            _fail("give --rate (requests a second) or --concurrency (requests in flight)")
        if kind is not ArrivalKind.POISSON or burstiness is not None:
            _fail("--arrival and --burstiness need --rate: a closed loop has no arrival process")
        return ClosedLoop(concurrency)
    if burstiness is not None and kind is not ArrivalKind.GAMMA:
        _fail("--burstiness needs --arrival gamma")
    if kind is ArrivalKind.CONSTANT:
        return Constant(rate)
    return Gamma(rate, burstiness or 1.0) if kind is ArrivalKind.GAMMA else Poisson(rate)


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
