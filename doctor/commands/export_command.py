"""``vtune doctor export``: alerts and a dashboard, from the same rules that the doctor judges."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from doctor.commands.options import assumptions, choose_source, flags_of, interrupted
from loadgen.commands.connection_options import ConnectionOptions
from loadgen.commands.options import with_options

if TYPE_CHECKING:
    from doctor.export.compile import RuleCompiler

export_app = typer.Typer(
    no_args_is_help=True, help="Write the doctor's rules as Prometheus alerts, or its figures as a dashboard."
)


@dataclass(frozen=True)
class Exported:
    """What the rules are made for. Their metric names are those of whatever is looked at, or of a version."""

    flags: Annotated[
        str | None,
        typer.Option(help="The servers' command: 'vllm serve M …'. Rules on flags need it, or --log."),
    ] = None
    log: Annotated[Path | None, typer.Option(help="A server's log: its flags.")] = None
    slo: Annotated[str | None, typer.Option(help="Your objectives: itl_p99<50ms,ttft_p95<300ms.")] = None
    assume: Annotated[
        list[str] | None, typer.Option(help="What metrics cannot show: shared-prefix=1000.")
    ] = None
    selector: Annotated[str, typer.Option(help='Which series: \'job="vllm",namespace="prod"\'.')] = ""
    window: Annotated[str | None, typer.Option(help="How far every rule looks back (default 5m).")] = None
    metrics: Annotated[
        str | None, typer.Option(help="A server whose metric names are used, by its /metrics.")
    ] = None
    prometheus: Annotated[str | None, typer.Option(help="A Prometheus, whose metric names are used.")] = None
    series: Annotated[Path | None, typer.Option(help="A recording, whose metric names are used.")] = None
    vllm_version: Annotated[
        str | None,
        typer.Option(help="Instead: the metric names of this vLLM, such as 0.10.1 (newest by default)."),
    ] = None

    @property
    def inside(self) -> str:
        """The selector without its braces."""
        return self.selector.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")


@export_app.command("alerts")
@with_options
def export_alerts(wanted: Exported, reached: ConnectionOptions) -> None:
    """Print Prometheus alerting rules: one per playbook, plus absent() alerts for missing metrics.

    Rules that depend on an unknown flag are named in a comment instead.

    Example: vtune doctor export alerts --flags "vllm serve m --max-num-seqs 64" > vtune-rules.yml
    """
    from doctor.diagnosis.playbook import load_all
    from doctor.export.alerts import alert_rules

    typer.echo(alert_rules(load_all(), _compiler(wanted, wanted.inside, reached)).text(), nl=False)


@export_app.command("dashboard")
@with_options
def export_dashboard(wanted: Exported, reached: ConnectionOptions) -> None:
    """Print a Grafana dashboard (JSON, to be imported): which rules hold, and the figures behind them.

    Example: vtune doctor export dashboard --prometheus http://prometheus:9090 > vtune-dashboard.json
    """
    import json

    from doctor.diagnosis.playbook import load_all
    from doctor.export.dashboard import INSTANCES, dashboard

    own = ",".join(filter(None, [wanted.inside, INSTANCES]))
    typer.echo(json.dumps(dashboard(load_all(), _compiler(wanted, own, reached)), indent=2))


def _compiler(wanted: Exported, selector: str, reached: ConnectionOptions) -> RuleCompiler:
    """``selector``: what the exported rules select; a Prometheus is looked at with the one asked for."""
    from doctor.export.export import compiler
    from doctor.metrics.period import window_seconds
    from servers.server_log import read_log

    try:
        sources = (wanted.metrics, wanted.prometheus, wanted.series)
        where = wanted.inside if wanted.prometheus is not None else ""
        looked_at = any(given is not None for given in sources)
        source = choose_source(*sources, None, where, connection=reached.connection) if looked_at else None
        return compiler(
            source,
            flags_of(wanted.flags).flags if wanted.flags is not None else None,
            wanted.slo,
            log=read_log(wanted.log) if wanted.log is not None else None,
            assume=assumptions(wanted.assume or []),
            window=None if wanted.window is None else window_seconds(wanted.window),
            selector=selector,
            version=wanted.vllm_version,
        )
    except KeyboardInterrupt:
        interrupted("interrupted before two scrapes were taken")
