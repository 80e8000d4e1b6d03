"""One simulated run and its report: that of ``vtune bench run``, and a fleet's replicas side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from loadgen.measure.record import Records
from loadgen.measure.stats import Summary
from loadgen.output import report
from loadgen.output.escape import printable
from loadgen.targets.simulated import PREFIX, SimulatedTarget
from servers.command import parse_command
from servers.errors import UserError

if TYPE_CHECKING:
    from loadgen.commands.options import Load
    from loadgen.sim.routing import Policy

HEADS = ("replica", "requests", "failed", "TTFT p50", "TTFT p99", "ITL p99", "output tok/s", "cached")


@dataclass(frozen=True)
class Simulated:
    """What came of a run. ``parts``: of each replica, in a fleet; ``seconds``: virtual ones."""

    records: Records
    parts: tuple[Records, ...]
    seconds: float
    memory: str
    """The memory plan of a server."""
    routing: str = ""


def simulate(
    target: str,
    model: str,
    flags: str | Mapping[str, Any],
    load: Load,
    *,
    seed: int = 0,
    replicas: int = 1,
    routing: Policy = "least-loaded",
    acceptance: float | None = None,
    note: Callable[[str], None] | None = None,
    stop: threading.Event | None = None,
) -> Simulated:
    """``flags``: a command, or its flags. Raises UserError for what was written wrong, StartFailed for a
    config that does not start.
    """
    if not target.startswith(PREFIX):
        raise UserError(f"--target {target}: write {PREFIX}h100 or another device")
    if isinstance(flags, str):
        flags = parse_command(flags).flags if flags.strip() else {}
    device = SimulatedTarget(
        target, model, replicas=replicas, routing=routing, acceptance=acceptance, calibrating=note
    )
    with device.open(flags) as server:
        assert server.max_model_len is not None
        schedule = load.source(server.max_model_len)(seed)
        records = server.run(schedule, stop=stop)
        routed = routing if replicas > 1 else ""
        return Simulated(records, server.parts, device.clock(), server.log_tail(), routed)


def replica_rows(done: Simulated) -> Iterator[tuple[str, ...]]:
    """One row of text per replica, and one for all; over the whole run's window."""
    for name, records in [*((str(n), part) for n, part in enumerate(done.parts)), ("all", done.records)]:
        summary = Summary(replace(records, window=done.records.window))
        prompts = sum(r.prompt_tokens or 0 for r in records.requests if r.ok)
        cached = sum(r.cached_tokens or 0 for r in records.requests if r.ok)
        figures = ("ttft_p50", "ttft_p99", "itl_p99")
        yield (
            name,
            f"{summary.value('measured'):.0f}",
            f"{summary.value('failed'):.0f}",
            *(report.duration(summary.value(figure), summary.count(figure)) for figure in figures),
            report.number(summary.value("throughput")),
            f"{cached / prompts:.0%}" if prompts else "n/a",
        )


def heading(done: Simulated) -> str:
    """The first line of every report."""
    fleet = f"; {len(done.parts)} replicas, {done.routing} routing" if done.parts else ""
    return f"ESTIMATE: nothing was measured{fleet}"


def print_simulation(done: Simulated, file: IO[str]) -> None:
    console = report.wide_console(file)
    console.print(heading(done), style="bold yellow" if console.is_terminal else None)
    for line in done.memory.splitlines():
        console.print(printable(line), soft_wrap=True)
    report.print_run(done.records, file)
    if done.parts:
        console.print(report.text_table(HEADS, list(replica_rows(done)), left=1))


def simulation_markdown(done: Simulated) -> str:
    from markupsafe import Markup

    from loadgen.output.page import render

    return render(
        "simulation.md.j2",
        heading=heading(done),
        memory=done.memory.splitlines(),
        report=Markup(report.run_markdown(done.records)),
        heads=HEADS,
        rows=list(replica_rows(done)) if done.parts else [],
    )


def simulation_json(done: Simulated) -> dict[str, Any]:
    """The report of ``vtune bench run``, with ``estimate`` true, the memory plan, and one per replica."""
    data = {**report.run_json(done.records), "estimate": True, "memory": done.memory, "seconds": done.seconds}
    if done.parts:
        data |= {"routing": done.routing, "replicas": [report.run_json(part) for part in done.parts]}
    return data
