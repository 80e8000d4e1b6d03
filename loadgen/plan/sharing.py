"""What the prompts of a schedule have in common: what a prefix cache can find that was empty before."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.plan.workload import PlannedRequest, Schedule

BLOCK_TOKENS, BLOCK_CHARACTERS = 16, 64
"""A prefix cache has whole blocks only; four characters are about a token."""


def repeated_share(schedule: Schedule) -> float:
    """Share of the prompts, warm-up included, whose blocks repeat the beginning of one before; 0 to 1."""
    known: set[int] = set()
    repeated = total = 0
    for request in (*schedule.warmup, *schedule.requests):
        content, size = _content(request)
        chain, beginning = 0, True
        total += len(content)
        for start in range(0, len(content) - size + 1, size):
            chain = hash((chain, content[start : start + size]))
            beginning = beginning and chain in known
            repeated += size * beginning
            known.add(chain)
    return repeated / total if total else 0.0


def _content(request: PlannedRequest) -> tuple[Sequence[int] | str, int]:
    """(what is sent, the length of a block in it)."""
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids, BLOCK_TOKENS
    if request.messages is not None:
        return "\n".join(f"{message.role}: {message.text}" for message in request.messages), BLOCK_CHARACTERS
    return request.prompt or "", BLOCK_CHARACTERS
