"""``vtune doctor diff``: two recordings, or two windows of one source."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from doctor.commands.options import flags_of, interrupted
from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import with_options
from servers.errors import OptionError

if TYPE_CHECKING:
    from doctor.diagnosis.diff import DiffSide
    from doctor.metrics.period import Period
    from servers.connection import Connection


class DiffFormat(StrEnum):
    text = "text"
    json = "json"
    markdown = "markdown"


@with_options
def diff_command(
    a: Annotated[Path | None, typer.Argument(help="A recording (.prom, .prom.gz).")] = None,
    b: Annotated[Path | None, typer.Argument(help="The later one; without it, two windows of A.")] = None,
    prometheus: Annotated[str | None, typer.Option(help="A Prometheus instead of recordings.")] = None,
    selector: Annotated[str, typer.Option(help="Which series of the Prometheus: 'job=\"vllm\"'.")] = "",
    window_a: Annotated[
        str | None, typer.Option(help="From..until: 13:55..14:05, 2026-11-29T13:55..14:05, -20m..-10m.")
    ] = None,
    window_b: Annotated[str | None, typer.Option(help="From..until of the later window.")] = None,
    flags_a: Annotated[str | None, typer.Option(help="The server's command in A: 'vllm serve M …'.")] = None,
    flags_b: Annotated[str | None, typer.Option(help="The server's command in B.")] = None,
    log_a: Annotated[Path | None, typer.Option(help="The server's log in A: its flags.")] = None,
    log_b: Annotated[Path | None, typer.Option(help="The server's log in B.")] = None,
    slo: Annotated[str | None, typer.Option(help="Your objectives: itl_p99<50ms,ttft_p95<300ms.")] = None,
    format: Annotated[DiffFormat, typer.Option(help="text, json or markdown.")] = DiffFormat.text,
    *,
    reached: ConnectionOptions,
) -> None:
    """Say what changed between two windows: server, traffic, cache, load, latency, findings.

    Only what differs by more than chance is listed: causes before effects, the largest first.

    Example: vtune doctor diff --prometheus http://prom:9090 --window-a 13:45..14:00 --window-b 14:05..14:20

    Example: vtune doctor diff last-week.prom.gz today.prom.gz --log-a old.log --log-b new.log
    """
    import json

    from doctor.diagnosis.diff import as_lines, difference
    from doctor.diagnosis.judged_objectives import judged_objectives

    try:
        spans = (_window(window_a, "--window-a"), _window(window_b, "--window-b"))
        paths = (a, b if b is not None else a)
        if prometheus is None and a is None:
            raise OptionError("nothing to compare: give two recordings, or --prometheus URL and two windows")
        if (prometheus is not None or b is None) and None in spans:
            raise OptionError(
                "two windows of one source need --window-a and --window-b, such as 13:55..14:05"
            )
        commands = (
            flags_of(flags_a, "--flags-a").flags if flags_a is not None else None,
            flags_of(flags_b, "--flags-b").flags if flags_b is not None else None,
        )
        sides = [
            _side(prometheus, selector, reached.connection, path, span, flags, log)
            for path, span, flags, log in zip(paths, spans, commands, (log_a, log_b), strict=True)
        ]
        found = difference(sides[0], sides[1], judged_objectives(slo))
    except KeyboardInterrupt:
        interrupted()
    if format is DiffFormat.json:
        typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        typer.echo(as_lines(found, markdown=format is DiffFormat.markdown), nl=False)


def _window(text: str | None, option: str) -> Period | None:
    from doctor.metrics.period import period

    if text is None:
        return None
    since, dots, until = text.partition("..")
    if not dots or not since:
        raise OptionError(f"{option} {text}: write from..until, such as 13:55..14:05 or -20m..-10m")
    return period(since, until or None)


def _side(
    prometheus: str | None,
    selector: str,
    connection: Connection,
    path: Path | None,
    span: Period | None,
    flags: Mapping[str, Any] | None,
    log: Path | None,
) -> DiffSide:
    from doctor.diagnosis.diff import DiffSide
    from doctor.metrics.sources import PrometheusSource, SeriesFile, Source
    from servers.server_log import read_log

    source: Source
    if prometheus is not None:
        source = PrometheusSource(prometheus, selector, period=span, connection=connection)
    else:
        assert path is not None
        source = SeriesFile(path, span)
    return DiffSide(source, flags, None if log is None else read_log(log))
