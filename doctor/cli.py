"""Commands of this folder. Light: heavy imports sit inside the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doctor.commands.changed_command import changed_command
from doctor.commands.diff_command import diff_command
from doctor.commands.export_command import export_app
from doctor.commands.options import assumptions, choose_source, flags_of, interrupted
from doctor.commands.playbook_command import playbook_app
from doctor.commands.verify_command import verify_command
from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import with_options
from servers.errors import OptionError

if TYPE_CHECKING:
    from doctor.diagnosis.finding import Diagnosis
    from doctor.metrics.sources import Source

doctor_app = typer.Typer(invoke_without_command=True, no_args_is_help=True)
doctor_app.add_typer(export_app, name="export")
doctor_app.command("diff")(diff_command)
doctor_app.command("verify")(verify_command)


class DoctorFormat(StrEnum):
    text = "text"
    json = "json"
    markdown = "markdown"
    junit = "junit"


class Threshold(StrEnum):
    info = "info"
    warning = "warning"
    critical = "critical"


def mount(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.add_typer(doctor_app, name="doctor")
    app.add_typer(playbook_app, name="playbook")
    app.command("changed")(changed_command)


@doctor_app.callback()
@with_options
def doctor(
    context: typer.Context,
    metrics: Annotated[
        str | None, typer.Option(help="A server's /metrics page, watched over the window (default 15 s).")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="A Prometheus that scrapes the server(s); window 5 min by default.")
    ] = None,
    series: Annotated[
        Path | None,
        typer.Option(help="Recorded scrapes (.prom, .prom.gz), each after a '# scrape_unix_ms N' line."),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="The server's log: its flags; alone, also the source of what it reports on load."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="The result of vllm bench serve or another tool: can it be relied on? Also beside the "
            "metrics of that time."
        ),
    ] = None,
    flags: Annotated[
        str | None,
        typer.Option(help="The command the server was started with: 'vllm serve M --max-num-seqs 64'."),
    ] = None,
    selector: Annotated[
        str, typer.Option(help='Which series of the Prometheus: \'job="vllm",namespace="prod"\'.')
    ] = "",
    window: Annotated[
        str | None, typer.Option(help="How far back to look: 90s, 5m, 1h. A series: all of it by default.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Your objectives: itl_p99<50ms,ttft_p95<300ms. Defaults are printed.")
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(help="What metrics cannot show: shared-prefix=1000 (tokens that your prompts share)."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier recording of this server: what has shifted since?")
    ] = None,
    baseline_flags: Annotated[
        str | None, typer.Option(help="The server's command then, for --baseline.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="An incident gone by, from: 14:05, 2026-11-29T14:05, -30m. Prometheus and series."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="... and until when; now, or the recording's end.")
    ] = None,
    format: Annotated[
        DoctorFormat,
        typer.Option(help="text for people, json for programs, markdown for issues, junit for CI."),
    ] = DoctorFormat.text,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Judge again and again until Ctrl-C; without a terminal, as lines."),
    ] = False,
    interval: Annotated[
        str | None, typer.Option(help="How often --watch judges: 2s by default, 15s on a Prometheus.")
    ] = None,
    fail_on: Annotated[
        Threshold | None, typer.Option(help="Exit with 1 when a finding has this severity or a higher one.")
    ] = None,
    queries: Annotated[bool, typer.Option(help="Print the PromQL behind every figure.")] = True,
    *,
    reached: ConnectionOptions,
) -> None:
    """Say what is wrong with an LLM server, how that is known, and which flags to change.

    Every finding comes with its figures and their queries. What cannot be judged is named, with the reason.

    Examples:

      vtune doctor --metrics http://127.0.0.1:8000 --flags "vllm serve my-model --max-num-seqs 64"

      vtune doctor --prometheus http://prometheus:9090 --selector 'job="vllm"' --window 10m
      --slo "itl_p99<50ms"

      vtune doctor --series incident.prom.gz --log server.log --format json --fail-on warning
    """
    if context.invoked_subcommand is not None:
        return
    from doctor.diagnosis.diagnose import diagnose
    from doctor.metrics.period import period, window_seconds
    from doctor.metrics.sources import SeriesFile
    from servers.kinds import BUNDLED
    from servers.server_log import read_log

    try:
        source = choose_source(
            metrics, prometheus, series, log, selector, period(since, until), bench, reached.connection
        )
        command = flags_of(flags) if flags is not None else None
        before = flags_of(baseline_flags, "--baseline-flags") if baseline_flags is not None else None

        def judge() -> Diagnosis:
            return diagnose(
                source,
                command,
                slo,
                log=read_log(log) if log is not None else None,
                assume=assumptions(assume or []),
                window=None if window is None else window_seconds(window),
                baseline=None if baseline is None else SeriesFile(baseline),
                baseline_flags=before,
                kind=BUNDLED if command is not None and command.kind is BUNDLED else None,
            )

        if watch:
            pause = (
                window_seconds(interval, "--interval") if interval else 2.0 if prometheus is None else 15.0
            )
            source = _rolling(source)
            diagnosis = _watch(judge, pause, format)
        else:
            diagnosis = judge()
            _print(diagnosis, format, queries, fail_on)
    except KeyboardInterrupt:
        interrupted("interrupted before two scrapes were taken")
    raise typer.Exit(_exit_code(diagnosis, fail_on))


def _rolling(source: Source) -> Source:
    """A page that is watched is scraped once a look, and judged over the last minute."""
    from doctor.metrics.sources import MetricsUrl
    from doctor.output.watch import RollingMetrics

    return RollingMetrics(source) if isinstance(source, MetricsUrl) else source


def _watch(judge: Callable[[], Diagnosis], pause: float, format: DoctorFormat) -> Diagnosis:
    import json
    from datetime import datetime

    from doctor.diagnosis.finding import Diagnosis
    from doctor.output.watch import line, screen, watch
    from servers.errors import SourceError

    if format not in (DoctorFormat.text, DoctorFormat.json):
        raise OptionError(f"--watch writes text or json, not {format.value}")

    def show(seen: Diagnosis | SourceError) -> None:
        now = datetime.now()
        if format is DoctorFormat.json:
            document = seen.to_json() if isinstance(seen, Diagnosis) else {"error": str(seen)}
            typer.echo(json.dumps({"at": now.astimezone().isoformat(), **document}, allow_nan=False))
        elif sys.stdout.isatty():
            typer.echo(screen(seen, now), nl=False)
        else:
            typer.echo(line(seen, now))
        sys.stdout.flush()

    last = watch(judge, show, pause)
    if last is None:
        raise KeyboardInterrupt
    return last


def _print(diagnosis: Diagnosis, format: DoctorFormat, queries: bool, fail_on: Threshold | None) -> None:
    import json

    from doctor.diagnosis.playbook import load_all
    from doctor.output.junit import as_junit
    from doctor.output.markdown import as_markdown
    from doctor.output.report import as_text

    if sys.stderr.isatty():
        typer.echo("\r", nl=False, err=True)
    match format:
        case DoctorFormat.json:
            typer.echo(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False))
        case DoctorFormat.markdown:
            typer.echo(as_markdown(diagnosis, queries=queries), nl=False)
        case DoctorFormat.junit:
            typer.echo(as_junit(diagnosis, load_all(), fail_on.value if fail_on else "warning"), nl=False)
        case DoctorFormat.text:
            typer.echo(as_text(diagnosis, queries=queries), nl=False)


def _exit_code(diagnosis: Diagnosis, fail_on: Threshold | None) -> int:
    from doctor.diagnosis.playbook import SEVERITIES

    worst = diagnosis.worst()
    if fail_on is None or worst is None:
        return 0
    return int(SEVERITIES.index(worst) >= SEVERITIES.index(fail_on.value))
