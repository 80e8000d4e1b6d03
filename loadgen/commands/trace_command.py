"""``vtune bench trace``: what a recorded trace holds, before it is replayed. Light to import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadgen.output.escape import markdown_text, printable
from loadgen.output.terminal import Format

if TYPE_CHECKING:
    from loadgen.plan.traces import Trace

_CAPACITIES = (1_000, 5_000, 20_000, 50_000)


def mount(bench: typer.Typer) -> None:
    """Add the command to ``bench``."""
    bench.command()(trace)


def trace(
    file: Annotated[Path, typer.Argument(help="A trace, as for `vtune bench run --trace`.")],
    trace_columns: Annotated[
        str | None, typer.Option(help="E.g. time=ts:ms,prompt=in,output=out; as for bench run.")
    ] = None,
    format: Annotated[Format, typer.Option(help="What is printed.")] = Format.TEXT,
) -> None:
    """Describe recorded traffic: rate, burstiness, lengths, and what a prefix cache of which size would find.

    Examples:

      vtune bench trace recorded.jsonl

      vtune bench trace requests.csv --trace-columns time=ts:ms,prompt=input,output=generated --format json
    """
    from loadgen.plan.trace_formats import Columns, read_trace

    read = read_trace(file, Columns.parse(trace_columns) if trace_columns else None)
    facts = trace_facts(read)
    if format is Format.JSON:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        if format is Format.MARKDOWN:
            typer.echo(f"- **{markdown_text(name)}**: {markdown_text(str(text))}")
        else:
            typer.echo(f"{name:<26} {printable(str(text))}")


def trace_facts(read: Trace) -> dict[str, Any]:
    """Names to plain values, for a table or JSON."""
    import numpy as np

    def percentiles(values: list[int]) -> dict[str, int]:
        found = np.percentile(values, [50, 90, 99, 100])
        return {name: round(float(v)) for name, v in zip(("p50", "p90", "p99", "max"), found, strict=True)}

    classes: dict[str, int] = {}
    for row in read.rows:
        classes[row.cls] = classes.get(row.cls, 0) + 1
    facts: dict[str, Any] = {
        "trace": read.name,
        "notes": ", ".join(read.notes) or "none",
        "requests": len(read.rows),
        "duration s": round(read.duration, 1),
        "rate req/s": float(f"{read.rate:.3g}"),
        "CV of the gaps": float(f"{read.gap_cv:.3g}"),
        "prompt tokens": percentiles([row.prompt_tokens for row in read.rows]),
        "output tokens": percentiles([row.output_tokens for row in read.rows]),
        "classes": classes,
    }
    if read.block_tokens:
        tokens, hits = read.prefix_hits()
        facts["shared prefixes"] = f"{hits / tokens:.1%} of the prompt tokens, if nothing is ever evicted"
        facts[f"with a cache of N blocks of {read.block_tokens} tokens"] = {
            str(blocks): f"{read.prefix_hits(blocks)[1] / tokens:.1%}" for blocks in _CAPACITIES
        }
    return facts
