"""The steps of ``vtune explain`` as a table: how each step's token budget was cut."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from engine.explain.explain import ExplainedStep, StepShare
from engine.explain.explain_input import Setup

HEADINGS: tuple[str, ...] = (
    "step",
    "budget",
    "used",
    "left",
    "running",
    "waiting",
    "blocks",
    "who gets how many",
    "what happens",
)
LEFT_ALIGNED = ("budget", "who gets how many", "what happens")
MAX_COLUMN_CHARACTERS = 60
"""A longer cell pushes its row to the right, and not the whole column."""
BAR_CHARACTERS = 32
LEGEND = "budget: d decode, p prefill, s speculative draft, . left over"


def describe_setup(setup: Setup) -> str:
    """Two lines: every cap the scheduler obeys, and how to read the table."""
    engine = setup.engine
    chunks = engine.enable_chunked_prefill and engine.scheduler == "unified"
    parts = [
        f"{engine.step_tokens} tokens per step",
        f"at most {engine.max_num_seqs} sequences of {engine.max_model_len} tokens",
        f"{setup.num_gpu_blocks - 1} usable blocks of {engine.block_size}",
        engine.scheduling_policy,
        f"chunked prefill {'on' if chunks else 'off'}",
        f"prefix cache {'on' if engine.enable_prefix_caching else 'off'}",
    ]
    if engine.prefill_threshold:
        parts.append(f"at most {engine.prefill_threshold} tokens per request")
    if engine.max_num_partial_prefills:
        long = engine.max_long_partial_prefills
        parts.append(f"at most {engine.max_num_partial_prefills} mid-prefill, {long} of them long")
    if engine.enable_lora:
        parts.append(f"adapters of a step: at most {engine.max_loras}")
    if engine.num_speculative_tokens:
        parts.append(f"up to {engine.num_speculative_tokens} drafts per request")
    legend = LEGEND
    if engine.scheduler != "unified":
        parts.insert(0, f"{engine.scheduler} scheduler")
        legend += ", x padding"
    if engine.preemption_mode == "swap":
        parts.append(f"swaps to {setup.num_host_blocks} host blocks")
    return f"{'; '.join(parts)}\n{legend}"


def budget_bar(step: ExplainedStep) -> str:
    """The budget as a strip of letters, one per token, or scaled down where the budget is large."""
    letters = "".join(_letters(share) for share in step.shares) + "x" * sum(step.plan.padding)
    budget = step.plan.token_budget
    if budget <= BAR_CHARACTERS:
        return letters.ljust(budget, ".")
    cells = [int(place * budget / BAR_CHARACTERS) for place in range(BAR_CHARACTERS)]
    return "".join(letters[cell] if cell < len(letters) else "." for cell in cells)


def _letters(share: StepShare) -> str:
    own = share.num_tokens - share.num_drafts
    return ("p" if share.prefill else "d") * own + "s" * share.num_drafts


def describe_share(share: StepShare) -> str:
    """``A 1``, ``A 1+3`` with drafts, ``A 6 (6/10)`` for a prefill that is not at its end before the step."""
    own = share.num_tokens - share.num_drafts
    text = f"{share.request_id} {own}"
    if share.num_drafts:
        text += f"+{share.num_drafts}"
    if share.prefill:
        text += f" ({share.end}/{share.num_known})"
    return text


def describe_events(step: ExplainedStep) -> str:
    """What changed in the step, and why requests still wait."""
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
    if plan.padding:
        events.append(f"pads with {sum(plan.padding)}")
    for name, copies in (("out", plan.swap_out), ("in", plan.swap_in)):
        if copies:
            events.append(f"swaps {len(copies)} blocks {name}")
    for share in step.shares:
        if share.num_drafts:
            accepted = step.emitted[share.request_id] - 1
            events.append(f"{share.request_id}: {accepted} of {share.num_drafts} drafts accepted")
    if step.output.finished:
        events.append(f"finishes {', '.join(request.request_id for request in step.output.finished)}")
    if plan.admission_stop is not None:
        events.append(f"others wait: {plan.admission_stop.value}")
    return "; ".join(events)


def print_steps(setup: Setup, steps: Iterable[ExplainedStep], file: TextIO) -> None:
    """Print the table, one row a step; running, waiting and blocks are counted right after scheduling.

    When ``steps`` raises, the steps before are printed, and the error goes on.
    """
    file.write(describe_setup(setup) + "\n")
    rows = [HEADINGS]
    try:
        for step in steps:
            rows.append(_cells(setup, step))
    finally:
        widths = [min(max(map(len, column)), MAX_COLUMN_CHARACTERS) for column in zip(*rows, strict=True)]
        for row in rows:
            line = "  ".join(
                cell.ljust(width) if heading in LEFT_ALIGNED else cell.rjust(width)
                for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
            )
            file.write(_printable(line.rstrip(), file.encoding) + "\n")


def _printable(line: str, encoding: str) -> str:
    """``line`` with escapes for what an id may hold and the output cannot: controls, lone surrogates."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
    return "".join(shown).encode(encoding, "backslashreplace").decode(encoding)


def _cells(setup: Setup, step: ExplainedStep) -> tuple[str, ...]:
    plan, usable = step.plan, setup.num_gpu_blocks - 1
    used = plan.num_scheduled_tokens
    return (
        str(step.index),
        budget_bar(step),
        str(used),
        str(plan.token_budget - used - sum(plan.padding)),
        f"{plan.num_running}/{setup.engine.max_num_seqs}",
        str(plan.num_waiting),
        f"{usable - plan.free_blocks}/{usable}",
        ", ".join(describe_share(share) for share in step.shares) or "none",
        describe_events(step),
    )
