"""``vtune simulate``: what a config would do on a device that is not at hand. Light to import."""

from __future__ import annotations

import json
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from loadgen.commands.options import Load, positive, with_options
from loadgen.output.terminal import FAILED, INTERRUPTED, INVALID, Format, check_writable, interruptible
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.commands.simulation import Simulated
    from loadgen.measure.record import Records


class Routing(StrEnum):
    """Names on the command line."""

    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    PREFIX_AWARE = "prefix-aware"
    LENGTH_POOLED = "length-pooled"


def mount(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("simulate", no_args_is_help=True)(simulate_command)


@with_options
def simulate_command(
    load: Load,
    target: Annotated[
        str,
        typer.Option(
            help="simulated:a100-40, a100, h100, h100-pcie, h200, b200, l40s or mi300x (by data sheet), "
            "simulated:bundled (this machine, as measured), or simulated:FILE.json with step times."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="config.json, a checkpoint's directory, or a hub id. [bundled]")
    ] = "bundled",
    flags: Annotated[
        str, typer.Option(help="The server's command or flags, e.g. 'vllm serve M --max-num-seqs 64'.")
    ] = "",
    replicas: Annotated[int, typer.Option(min=1, max=1024, help="Servers behind a router.")] = 1,
    routing: Annotated[Routing, typer.Option(help="Which replica gets a request.")] = Routing.LEAST_LOADED,
    acceptance: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Chance that a draft is accepted if those before it were. [0.6]"),
    ] = None,
    size: Annotated[
        bool, typer.Option("--size", help="Find the fewest GPUs (replicas and TP) that hold --slo.")
    ] = False,
    slo: Annotated[
        str | None, typer.Option(help="With --size: bounds, e.g. ttft_p95<1s,itl_p99<50ms.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(callback=positive, help="With --size: of a GPU, per hour; any currency.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Random seed of arrivals, classes, lengths and prompts.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for records.json, report.md/.html, and replica-N.json of a fleet."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the records here.")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write an offline HTML report here.")
    ] = None,
    format: Annotated[Format, typer.Option(help="What is printed.")] = Format.TEXT,
) -> None:
    """Simulate a config under a load, in virtual time: the real scheduler, estimated step times.

    What is printed is an ESTIMATE with what it assumes, in the form of `vtune bench run`. The same command
    gives the same figures, anywhere.

    Examples:

      vtune simulate --target simulated:h100 --model config.json --rate 20 --duration 60s

      vtune simulate --target simulated:h100 --model config.json --flags '--max-num-batched-tokens 2048'
      --trace azure.csv --trace-window 0s,10m

      vtune simulate --target simulated:h200 --model config.json --workload mixed --rate 60 --duration 2m
      --replicas 4 --routing length-pooled

      vtune simulate --size --slo 'ttft_p95<1s,itl_p99<50ms' --target simulated:h100 --model config.json
      --trace day.csv --price 2.5

    Exit codes: 0 simulated (--size: found), 1 --size found no fleet, 2 bad usage or a config that does not
    start, 3 nothing was answered, 130 interrupted (what was simulated is kept).
    """
    if size:
        if slo is None:
            raise UserError("--size needs --slo: the bounds that the fleet must hold, e.g. 'ttft_p95<1s'")
        if replicas != 1:
            raise UserError("--size finds the number of replicas: leave --replicas out")
        _size(load, target, model, flags, routing, acceptance, seed, slo, price, out, format)
    if slo is not None or price is not None:
        raise UserError("--slo and --price go with --size")
    check_writable(out, json_file, html_file)
    from loadgen.commands.simulation import simulate as run
    from loadgen.target import TargetFailed

    try:
        load.check()
        with interruptible() as stop:
            began = time.perf_counter()
            done = run(
                target,
                model,
                flags,
                load,
                seed=seed,
                replicas=replicas,
                routing=routing.value,
                acceptance=acceptance,
                note=lambda text: typer.echo(text, err=True),
                stop=stop,
            )
            took = time.perf_counter() - began
    except TargetFailed as failure:
        raise UserError(f"the server would not start: {failure.detail}") from None
    typer.echo(
        f"simulated {done.seconds:.0f} s in {took:.1f} s ({done.seconds / took:.0f} x real time)", err=True
    )
    _write(done, out, json_file, html_file)
    _print(done, format)
    raise typer.Exit(_exit_code(done.records))


def _size(
    load: Load,
    target: str,
    model: str,
    flags: str,
    routing: Routing,
    acceptance: float | None,
    seed: int,
    slo: str,
    price: float | None,
    out: Path | None,
    format: Format,
) -> NoReturn:
    from loadgen.commands.simulation import simulate as run
    from loadgen.commands.sizing import Sizing, print_size, size_json, size_markdown
    from loadgen.commands.sizing import size as answer
    from loadgen.sim.accuracy import latency_error
    from servers.command import parse_command
    from servers.files import write_atomically
    from servers.slo.bounds import parse_bounds

    check_writable(out)
    load.check()
    bounds = parse_bounds(slo)
    given = parse_command(flags).flags if flags.strip() else {}
    width = given.get("tensor_parallel_size")

    with interruptible() as stop:

        def simulated(width: int, replicas: int) -> Records:
            typer.echo(f"{replicas} x {width} GPU", err=True)
            done = run(
                target,
                model,
                {**given, "tensor_parallel_size": width},
                load,
                seed=seed,
                replicas=replicas,
                routing=routing.value,
                acceptance=acceptance,
                stop=stop,
            )
            if done.records.partial:
                raise typer.Exit(INTERRUPTED)
            return done.records

        search = Sizing(simulated, bounds, error=latency_error(target))
        if width is not None:
            search.widths = (int(width),)
        found = answer(search)
    told = size_json(found, price)
    if out:
        write_atomically(out / "size.json", [json.dumps(told, indent=2), "\n"])
        write_atomically(out / "size.md", [size_markdown(found, price)])
    if format is Format.JSON:
        typer.echo(json.dumps(told, indent=2))
    elif format is Format.MARKDOWN:
        typer.echo(size_markdown(found, price), nl=False)
    else:
        print_size(found, price, sys.stdout)
    raise typer.Exit(0 if found.best else FAILED)


def _exit_code(records: Records) -> int:
    if records.partial:
        return INTERRUPTED
    return 0 if any(record.ok for record in records.requests) else INVALID


def _write(done: Simulated, out: Path | None, json_file: Path | None, html_file: Path | None) -> None:
    from loadgen.commands.simulation import simulation_json, simulation_markdown
    from servers.files import write_atomically

    pages = [html_file] if html_file else []
    try:
        if json_file:
            done.records.save(json_file)
        if out:
            done.records.save(out / "records.json")
            for number, part in enumerate(done.parts):
                part.save(out / f"replica-{number}.json")
            write_atomically(out / "summary.json", [json.dumps(simulation_json(done), indent=2), "\n"])
            write_atomically(out / "report.md", [simulation_markdown(done)])
            pages.append(out / "report.html")
        if pages:
            from loadgen.output.run_page import run_page

            page = run_page(done.records)
            for path in pages:
                write_atomically(path, [page])
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None


def _print(done: Simulated, format: Format) -> None:
    from loadgen.commands.simulation import print_simulation, simulation_json, simulation_markdown

    try:
        if format is Format.JSON:
            typer.echo(json.dumps(simulation_json(done), indent=2))
        elif format is Format.MARKDOWN:
            typer.echo(simulation_markdown(done))
        else:
            print_simulation(done, sys.stdout)
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
