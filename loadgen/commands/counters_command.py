"""``vtune bench counters``: what the bundled engine does with a workload, exactly, and the gate on it.

Light to import.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.commands.options import Load, with_options
from loadgen.output.terminal import FAILED, check_writable
from servers.errors import OptionError, UserError

if TYPE_CHECKING:
    from loadgen.measure.counters import CounterChange, Counters

_HIDDEN = ("schedule_sha256", "flags", "environment", "steps_per_second")


class CountersFormat(StrEnum):
    """What goes to stdout."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"
    JUNIT = "junit"


def mount(bench: typer.Typer) -> None:
    """Add the command to ``bench``."""
    bench.command()(counters)


@with_options
def counters(
    load: Load,
    flags: Annotated[
        str, typer.Option(help="The engine's command: its model and flags.")
    ] = "vtune serve bundled",
    steps_per_second: Annotated[
        float, typer.Option(min=0.001, help="Steps that the schedule's seconds are turned into.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, classes, lengths and prompts.")] = 0,
    baseline: Annotated[
        Path | None, typer.Option(help="Counters to compare with, exactly; a difference exits with 1.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the counters here, as a later baseline.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the comparison as JUnit XML here.")] = None,
    format: Annotated[CountersFormat, typer.Option(help="What is printed.")] = CountersFormat.TEXT,
) -> None:
    """Run a workload on the bundled engine with arrivals by step, and count what it does.

    The counters carry no noise: with --baseline, one step, token, hit or preemption more than before fails.
    The hash of the output is compared where the baseline was counted in the same environment.

    Examples:

      vtune bench counters --workload shared-prefix --rate 8 --num-requests 24 --out counters.json

      vtune bench counters --workload shared-prefix --rate 8 --num-requests 24 --baseline counters.json

    Exit codes: 0 counted (and the same), 1 different from the baseline, 2 bad usage.
    """
    from loadgen.measure.counters import Counters, differences
    from loadgen.targets.counting import count
    from servers.command import parse_command

    check_writable(None, out, junit)
    changed: list[CounterChange] = []
    try:
        before = Counters.load(baseline) if baseline else None
        load.check()
        command = parse_command(flags)
        length = command.flags.get("max_model_len", 8192)
        if not isinstance(length, int):
            raise OptionError(f"--max-model-len {length}: give a number")
        schedule = load.source(length, warmup=0)(seed)
        now = count(command.model or "bundled", command.flags, schedule, steps_per_second)
        if before:
            changed = differences(before, now)
        if out:
            now.save(out)
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    _show(now, before is not None, changed, junit, format)
    raise typer.Exit(FAILED if changed else 0)


def _show(
    now: Counters, compared: bool, changed: list[CounterChange], junit: Path | None, format: CountersFormat
) -> None:
    from loadgen.output.junit import Case
    from loadgen.output.junit import junit as to_junit
    from loadgen.output.page import render
    from servers.files import write_atomically

    found = {difference.name: difference for difference in changed}
    shown = {name: value for name, value in asdict(now).items() if name not in _HIDDEN}
    cases = [Case(name, str(found[name]) if name in found else "", text=str(v)) for name, v in shown.items()]
    if junit:
        write_atomically(junit, [to_junit(cases, "vtune bench counters")])
    if format is CountersFormat.JUNIT:
        typer.echo(to_junit(cases, "vtune bench counters").rstrip())
    elif format is CountersFormat.JSON:
        answer = {"counters": asdict(now), "differences": [asdict(d) for d in changed] if compared else None}
        typer.echo(json.dumps(answer, indent=2))
    elif format is CountersFormat.MARKDOWN:
        same = "same" if compared else ""
        rows = [(name, v, found[name].baseline if name in found else same) for name, v in shown.items()]
        typer.echo(render("table.md.j2", heads=("counter", "now", "baseline"), rows=rows, lines=()), nl=False)
    else:
        for name, value in shown.items():
            typer.echo(f"{name:<20} {value}")
        for difference in changed:
            typer.echo(f"DIFFERENT {difference}", err=True)
        if compared and not changed:
            typer.echo("the same as the baseline", err=True)
