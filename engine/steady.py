"""The steady path: what most requests do in most steps, at a fraction of the rule loop's cost.

A request decodes plainly when it lacks exactly its last token and has no drafts. No cap but the budget can
cut that one token, and it needs the pool only where it enters a block or fills one. The scheduler's rules
then come down to the two short loops here, which must decide exactly as they do; tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from engine.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus
from engine.step import Outputs, Rows


def plan_decodes(running: list[Request], budget: int, kv: KVCacheManager) -> Rows:
    """Rows for the longest head of ``running`` that decodes plainly within ``budget`` and the free blocks.

    Their ``num_computed_tokens`` have moved on, and their blocks are taken. Whoever follows them has not been
    touched: it is for the rule loop.
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
    if entering:
        kv.take_one_each(entering)
    if filling:
        kv.hash_one_each(filling)
    del requests[len(starts) :]
    return Rows(requests, starts, [1] * len(starts))


def append_tokens(
    requests: Sequence[Request], token_ids: list[int]
) -> tuple[Outputs, list[tuple[int, Request]]]:
    """Give each request its one token. Returns what that puts out, and the rows that may have met their end.

    Requests that do not run any more (they were aborted meanwhile) are left out. Without drafts nothing is
    rejected, and every block that is full was hashed when the step was planned.
    """
    alive = [request.status is RequestStatus.RUNNING for request in requests]
    if not all(alive):
        requests, token_ids = list(compress(requests, alive)), list(compress(token_ids, alive))
    ends: list[tuple[int, Request]] = []
    for row, (request, token) in enumerate(zip(requests, token_ids, strict=True)):
        tokens = request.token_ids
        tokens.append(token)
        if len(tokens) >= request.length_limit or token in request.stop_set:
            ends.append((row, request))
    return Outputs([request.request_id for request in requests], token_ids), ends
