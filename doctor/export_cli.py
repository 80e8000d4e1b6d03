"""``vtune doctor export``: alerts and a dashboard, from the same rules that the doctor judges."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doctor.options import assumptions, choose_source, stop

if TYPE_CHECKING:
    from doctor.compile import RuleCompiler

export_app = typer.Typer(
    no_args_is_help=True, help="Write the doctor's rules as Prometheus alerts, or its figures as a dashboard."
)

_Flags = Annotated[
    str | None, typer.Option(help="The servers' command: 'vllm serve M …'. Rules on flags need it, or --log.")
]
_Log = Annotated[Path | None, typer.Option(help="A server's log: its flags.")]
_Slo = Annotated[str | None, typer.Option(help="Your objectives: itl_p99<50ms,ttft_p95<300ms.")]
_Assume = Annotated[list[str] | None, typer.Option(help="What metrics cannot show: shared-prefix=1000.")]
_Selector = Annotated[str, typer.Option(help='Which series: \'job="vllm",namespace="prod"\'.')]
_Window = Annotated[str | None, typer.Option(help="How far every rule looks back (default 5m).")]
_Metrics = Annotated[str | None, typer.Option(help="A server whose metric names are used, by its /metrics.")]
_Prometheus = Annotated[str | None, typer.Option(help="A Prometheus, whose metric names are used.")]
_Series = Annotated[Path | None, typer.Option(help="A recording, whose metric names are used.")]
_Version = Annotated[
    str | None,
    typer.Option(help="Instead: the metric names of this vLLM, such as 0.10.1 (newest by default)."),
]


@export_app.command("alerts")
def export_alerts(
    flags: _Flags = None,
    log: _Log = None,
    slo: _Slo = None,
    assume: _Assume = None,
    selector: _Selector = "",
    window: _Window = None,
    metrics: _Metrics = None,
    prometheus: _Prometheus = None,
    series: _Series = None,
    vllm_version: _Version = None,
) -> None:
    """Print a Prometheus rule file: an alert a playbook, and absent() alerts for what blinds them.

    Rules that hang on a flag nobody stated are named in a comment instead.

    Example: vtune doctor export alerts --flags "vllm serve m --max-num-seqs 64" > vtune-rules.yml
    """
    from doctor.alerts import alert_rules
    from doctor.playbook import load_all

    made = _compiler(flags, log, slo, assume, selector, window, metrics, prometheus, series, vllm_version)
    typer.echo(alert_rules(load_all(), made).text(), nl=False)


@export_app.command("dashboard")
def export_dashboard(
    flags: _Flags = None,
    log: _Log = None,
    slo: _Slo = None,
    assume: _Assume = None,
    selector: _Selector = "",
    window: _Window = None,
    metrics: _Metrics = None,
    prometheus: _Prometheus = None,
    series: _Series = None,
    vllm_version: _Version = None,
) -> None:
    """Print a Grafana dashboard (JSON, to be imported): which rules hold, and the figures behind them.

    Example: vtune doctor export dashboard --prometheus http://prometheus:9090 > vtune-dashboard.json
    """
    import json

    from doctor.dashboard import INSTANCES, dashboard
    from doctor.playbook import load_all

    inside = selector.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")
    own = ",".join(filter(None, [inside, INSTANCES]))
    made = _compiler(flags, log, slo, assume, own, window, metrics, prometheus, series, vllm_version, inside)
    typer.echo(json.dumps(dashboard(load_all(), made), indent=2))


def _compiler(
    flags: str | None,
    log: Path | None,
    slo: str | None,
    assume: list[str] | None,
    selector: str,
    window: str | None,
    metrics: str | None,
    prometheus: str | None,
    series: Path | None,
    version: str | None,
    asked: str | None = None,
) -> RuleCompiler:
    """``asked``: the selector for looking at the Prometheus, where it is not the exported one."""
    from doctor.export import compiler
    from doctor.logfile import read_log
    from doctor.period import seconds
    from doctor.sources import SourceError
    from loadgen.flags import FlagError, parse_command
    from loadgen.slo import SloError

    selector = selector.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")
    try:
        looked_at = prometheus is not None or metrics is not None or series is not None
        where = (selector if asked is None else asked) if prometheus is not None else ""
        source = choose_source(metrics, prometheus, series, None, where) if looked_at else None
        return compiler(
            source,
            parse_command(flags).flags if flags is not None else None,
            slo,
            log=read_log(log) if log is not None else None,
            assume=assumptions(assume or []),
            window=None if window is None else seconds(window),
            selector=selector,
            version=version,
        )
    except FlagError as error:
        stop(f"--flags: {error}")
    except (SourceError, SloError, ValueError) as error:
        stop(str(error))
    except KeyboardInterrupt:
        stop("interrupted before two scrapes were taken", code=130)
