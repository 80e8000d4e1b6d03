"""The steps of ``vtune explain`` as a table: how each step's token budget was cut."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.explain import ExplainedStep, Share
from engine.explain_input import Setup

BAR_WIDTH = 32
WIDTH_OF_FILES = 200
"""Columns where the output is no terminal and COLUMNS is not set."""
LEGEND = "budget: d decode, p prefill, s speculative draft, . left over"


def describe_setup(setup: Setup) -> str:
    """Two lines: every cap the scheduler obeys, and how to read the table."""
    engine = setup.engine
    parts = [
        f"{engine.max_num_batched_tokens} tokens a step",
        f"at most {engine.max_num_seqs} sequences of {engine.max_model_len} tokens",
        f"{setup.num_gpu_blocks - 1} usable blocks of {engine.block_size}",
        engine.scheduling_policy,
        f"chunked prefill {'on' if engine.enable_chunked_prefill else 'off'}",
        f"prefix cache {'on' if engine.enable_prefix_caching else 'off'}",
    ]
    if engine.long_prefill_token_threshold:
        parts.append(f"at most {engine.long_prefill_token_threshold} tokens a request")
    if engine.num_speculative_tokens:
        parts.append(f"up to {engine.num_speculative_tokens} drafts a request")
    return f"{'; '.join(parts)}\n{LEGEND}"


def budget_bar(step: ExplainedStep) -> str:
    """The budget as a strip of letters, one a token, or scaled down where the budget is large."""
    letters = "".join(_letters(share) for share in step.shares)
    budget = step.plan.token_budget
    if budget <= BAR_WIDTH:
        return letters.ljust(budget, ".")
    cells = [int(place * budget / BAR_WIDTH) for place in range(BAR_WIDTH)]
    return "".join(letters[cell] if cell < len(letters) else "." for cell in cells)


def _letters(share: Share) -> str:
    own = share.num_tokens - share.num_drafts
    return ("p" if share.prefill else "d") * own + "s" * share.num_drafts


def describe_share(share: Share) -> str:
    """``A 1``, ``A 1+3`` with drafts, ``A 6 (6/10)`` for a prefill that is not at its end before the step."""
    own = share.num_tokens - share.num_drafts
    text = f"{share.request_id} {own}"
    if share.num_drafts:
        text += f"+{share.num_drafts}"
    if share.prefill:
        text += f" ({share.end}/{share.num_known})"
    return text


def describe_events(step: ExplainedStep) -> str:
    """What changed in the step, and why somebody still waits."""
    plan = step.plan
    events = []
    if plan.preempted:
        events.append(f"preempts {', '.join(plan.preempted)}")
    admitted = [
        f"{request_id} ({computed} cached)" if computed else request_id
        for request_id, computed in plan.admitted_with_computed.items()
    ]
    if admitted:
        events.append(f"admits {', '.join(admitted)}")
    for share in step.shares:
        if share.num_drafts:
            accepted = step.emitted[share.request_id] - 1
            events.append(f"{share.request_id}: {accepted} of {share.num_drafts} drafts accepted")
    if step.output.finished:
        events.append(f"finishes {', '.join(request.request_id for request in step.output.finished)}")
    if plan.admission_stop is not None:
        events.append(f"others wait: {plan.admission_stop.value}")
    return "; ".join(events)


def print_steps(setup: Setup, steps: Iterable[ExplainedStep]) -> None:
    """Print the table to standard output, one row a step.

    Running, waiting and blocks are counted right after scheduling. When ``steps`` raises, the steps before
    are printed, and the error goes on.
    """
    fixed = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if fixed else WIDTH_OF_FILES, highlight=False)
    table = _empty_table()
    console.print(Text(describe_setup(setup)))
    try:
        for step in steps:
            cells = _cells(setup, step)
            table.add_row(*(_printable(cell, console.encoding) for cell in cells))
    finally:
        console.print(table)


def _printable(cell: str, encoding: str) -> Text:
    """Text, as an id may hold markup; and without what the terminal, or any, cannot encode."""
    return Text(cell.encode(encoding, "backslashreplace").decode(encoding))


def _empty_table() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("budget", overflow="fold")
    table.add_column("used", justify="right")
    table.add_column("left", justify="right")
    table.add_column("who gets how many")
    table.add_column("running", justify="right")
    table.add_column("waiting", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("what happens")
    return table


def _cells(setup: Setup, step: ExplainedStep) -> tuple[str, ...]:
    plan, usable = step.plan, setup.num_gpu_blocks - 1
    used = plan.num_scheduled_tokens
    return (
        str(step.index),
        budget_bar(step),
        str(used),
        str(plan.token_budget - used),
        ", ".join(describe_share(share) for share in step.shares) or "nobody",
        f"{plan.num_running}/{setup.engine.max_num_seqs}",
        str(plan.num_waiting),
        f"{usable - plan.free_blocks}/{usable}",
        describe_events(step),
    )
