"""The decode fast path: what most requests do in most steps, at a fraction of the rule loop's cost.

A request decodes plainly when only its last token is not computed and it has no drafts. Only the budget can
withhold that one token, and it needs the pool only where it enters a block or fills one. The scheduler's
rules then reduce to the short loops here, which must decide exactly the same; tests hold the two equal. With
async scheduling the last token is still in flight when the next one is planned, which is a second loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from engine.kv.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus
from engine.step import Outputs, Rows, StepPlan

RUNNING = RequestStatus.RUNNING
"""A module constant, as looking it up in the Enum takes longer than comparing with it."""


def plan_decodes(running: list[Request], budget: int, kv: KVCacheManager) -> Rows:
    """Rows for the longest head of ``running`` that decodes plainly within ``budget`` and the free blocks.

    Their ``num_computed_tokens`` are advanced, and their blocks are taken. The requests behind them are left
    to the rule loop, unchanged.
    """
    block_size, last, num_free = kv.block_size, kv.block_size - 1, kv.pool.num_free
    requests = running[:budget]
    starts: list[int] = []
    entering: list[Request] = []
    filling: list[Request] = []
    for request in requests:
        start = request.num_computed_tokens
        if start + 1 != len(request.token_ids) or request.mid_prefill or request.spec_token_ids:
            break
        offset = start % block_size
        if offset == 0 and start == len(request.block_ids) * block_size:
            if len(entering) == num_free:
                break
            entering.append(request)
        if offset == last:
            filling.append(request)
        request.num_computed_tokens = start + 1
        starts.append(start)
    _book_blocks(kv, entering, filling)
    del requests[len(starts) :]
    return Rows(requests, starts, [1] * len(starts))


def plan_decodes_ahead(running: list[Request], budget: int, kv: KVCacheManager) -> tuple[Rows, int]:
    """As :func:`plan_decodes`, while the step before this one computes the last token of each request.

    Where that token goes is known; what it is decides only whether the request is still there. A request that
    it ends by length gets no row. Returns also how many of ``running`` were handled. There are no drafts. A
    block is hashed one step after it is full, as its last token is known only then.
    """
    block_size, num_free = kv.block_size, kv.pool.num_free
    requests: list[Request] = []
    starts: list[int] = []
    entering: list[Request] = []
    filling: list[Request] = []
    num_seen = 0
    for request in running[:budget]:
        start = request.num_computed_tokens
        if request.num_placeholders != 1 or start != len(request.token_ids):
            break
        if start + 1 < request.length_limit:
            if start % block_size == 0:
                if start == len(request.block_ids) * block_size:
                    if len(entering) == num_free:
                        break
                    entering.append(request)
                if request.num_hashed_blocks * block_size < start:
                    filling.append(request)
            request.num_computed_tokens = start + 1
            request.num_placeholders = 2
            requests.append(request)
            starts.append(start)
        num_seen += 1
    _book_blocks(kv, entering, filling)
    return Rows(requests, starts, [1] * len(starts)), num_seen


def _book_blocks(kv: KVCacheManager, entering: list[Request], filling: list[Request]) -> None:
    if entering:
        kv.take_one_each(entering)
    if filling:
        kv.hash_one_each(filling)


def land_tokens(requests: Sequence[Request], kv: KVCacheManager) -> None:
    """With async scheduling: the one token that each request had in flight has arrived.

    Blocks that the token before it filled were hashed when the next step was planned, unless the request is
    not in that step.
    """
    for request in requests:
        if request.status is RUNNING:
            request.num_placeholders -= 1
            if not request.num_placeholders:
                kv.hash_blocks(request, request.num_computed_tokens)


def drop_ended(plan: StepPlan) -> StepPlan:
    """``plan``, made while the step before it computed, without the requests that ended with that step. There
    are no drafts, so all others start where the plan says."""
    rows = plan.rows
    alive = [request.status is RUNNING for request in rows.requests]
    if all(alive):
        return plan
    requests = list(compress(rows.requests, alive))
    starts, counts = list(compress(rows.starts, alive)), list(compress(rows.counts, alive))
    silent = rows.silent.intersection([request.request_id for request in requests])
    return replace(plan, scheduled=Rows(requests, starts, counts, silent=silent))


def append_tokens(
    requests: Sequence[Request], token_ids: list[int]
) -> tuple[Outputs, list[tuple[int, Request]]]:
    """Give each request its one token. Returns the outputs, and the rows that may have ended.

    Requests that were aborted meanwhile are left out. Without drafts nothing is rejected, and every full
    block was hashed when the step was planned.
    """
    alive = [request.status is RUNNING for request in requests]
    if not all(alive):
        requests, token_ids = list(compress(requests, alive)), list(compress(token_ids, alive))
    ends: list[tuple[int, Request]] = []
    for row, (request, token) in enumerate(zip(requests, token_ids, strict=True)):
        tokens = request.token_ids
        tokens.append(token)
        if len(tokens) >= request.length_limit or token in request.stop_set:
            ends.append((row, request))
    return Outputs([request.request_id for request in requests], token_ids), ends
