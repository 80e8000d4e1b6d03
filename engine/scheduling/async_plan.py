"""Async scheduling: a plan made ahead of its time becomes exact once the step before it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.request import RequestStatus
from engine.step import PLACEHOLDER_TOKEN_ID, Rows, StepPlan


def settle(plan: StepPlan, unknown_drafts: Sequence[int]) -> StepPlan:
    """``plan`` was made while the step before it computed, in the belief that nobody stops and all drafts
    hold; now that step is booked.

    Who has stopped is left out. Everybody else starts where their drafts ceased to hold, and the drafts
    proposed meanwhile take the places that were kept for them; ``unknown_drafts`` are the places to keep in
    the step after this one.
    """
    rows = Rows()
    for request, _, num_tokens, drafts, emits in plan.scheduled:
        if request.status is not RequestStatus.RUNNING:
            continue
        if emits and request.request_id not in plan.admitted_with_computed:
            if PLACEHOLDER_TOKEN_ID in drafts:
                proposed = tuple(request.spec_token_ids[: len(drafts)])
                spare = len(drafts) - len(proposed)
                request.num_computed_tokens -= spare
                request.num_placeholders -= spare
                num_tokens, drafts = num_tokens - spare, proposed
            request.spec_token_ids = list(unknown_drafts)
        rows.append(request, request.num_computed_tokens - num_tokens, num_tokens, drafts, emits)
    return replace(plan, scheduled=rows)
