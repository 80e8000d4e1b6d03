"""What several of the doctor's commands read from their options. Light: heavy imports sit inside."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from loadgen.output.terminal import INTERRUPTED
from servers.errors import OptionError

if TYPE_CHECKING:
    from doctor.metrics.period import Period
    from doctor.metrics.sources import Source
    from servers.command import ServerCommand
    from servers.connection import Connection


def choose_source(
    metrics: str | None,
    prometheus: str | None,
    series: Path | None,
    log: Path | None,
    selector: str,
    period: Period | None = None,
    bench: Path | None = None,
    connection: Connection | None = None,
) -> Source:
    """The one source that the options name, and a benchmark's result beside it. Raises SourceError."""
    from doctor.metrics.benchmark import BenchmarkResult, WithBenchmark
    from doctor.metrics.log_source import LogSource
    from doctor.metrics.sources import MetricsUrl, PrometheusSource, SeriesFile
    from servers.connection import Connection
    from servers.errors import SourceError

    given = [
        name
        for name, value in (
            ("--metrics", metrics),
            ("--prometheus", prometheus),
            ("--series", series),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise SourceError(f"{' and '.join(given)} are different sources; give one")
    if selector and prometheus is None:
        raise SourceError("--selector chooses series of a Prometheus; it needs --prometheus URL")
    if period is not None and prometheus is None and series is None:
        raise SourceError(
            "--since and --until look into the past; they need --prometheus URL or --series FILE"
        )
    reached = connection or Connection()
    source: Source | None = None
    if metrics is not None:
        source = MetricsUrl(metrics, connection=reached, progress=_progress())
    elif prometheus is not None:
        source = PrometheusSource(prometheus, selector, period=period, connection=reached)
    elif series is not None:
        source = SeriesFile(series, period)
    if bench is not None:
        result = BenchmarkResult(bench)
        return result if source is None else WithBenchmark(source, result)
    if source is not None:
        return source
    if log is not None:
        return LogSource(log)
    raise SourceError(
        "nothing to look at: give --metrics URL, --prometheus URL, --series FILE, --bench FILE or --log FILE"
    )


def _progress() -> Callable[[float], None] | None:
    """Seconds watched so far, on a terminal only."""
    if not sys.stderr.isatty():
        return None
    return lambda elapsed: typer.echo(f"\rwatching … {elapsed:3.0f} s", nl=False, err=True)


def assumptions(texts: list[str]) -> dict[str, float]:
    """Read ``shared-prefix=1000``. Raises OptionError."""
    from doctor.diagnosis.playbook import ASSUMPTIONS

    assumed = {}
    for text in texts:
        name, _, value = text.partition("=")
        key = name.strip().replace("-", "_")
        if key not in ASSUMPTIONS:
            known = ", ".join(known.replace("_", "-") for known in ASSUMPTIONS)
            raise OptionError(f"--assume {text}: unknown; known: {known}")
        try:
            assumed[key] = float(value)
        except ValueError:
            raise OptionError(f"--assume {text}: write {name}=NUMBER") from None
        if not 0 <= assumed[key] < float("inf"):
            raise OptionError(f"--assume {text}: must be a number of tokens, 0 or more")
    return assumed


def flags_of(text: str, option: str = "--flags") -> ServerCommand:
    """The command that ``option`` gives. Raises FlagError, which names the option."""
    from servers.command import parse_command
    from servers.flags.words import FlagError

    try:
        return parse_command(text)
    except FlagError as error:
        raise FlagError(f"{option}: {error}") from None


def interrupted(message: str = "interrupted") -> NoReturn:
    """Say so, and end."""
    typer.echo(message, err=True)
    raise typer.Exit(INTERRUPTED)
