"""Async scheduling: bring a plan that was made ahead in line with the outcome of the step before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.request import RequestStatus
from engine.step import PLACEHOLDER_TOKEN_ID, Rows, StepPlan


def reconcile(plan: StepPlan, unknown_drafts: Sequence[int]) -> StepPlan:
    """``plan`` was made while the step before it computed, assuming that no request ends and all drafts are
    accepted. That step is now booked.

    Requests that have ended are left out. The others start after their last accepted draft, and the drafts
    proposed meanwhile replace the placeholders kept for them. ``unknown_drafts`` are the placeholders to keep
    in the step after this one.
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
