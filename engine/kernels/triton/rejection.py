"""Lossless verification of drafts (arXiv:2211.17192): what a step emits is distributed as without drafts.

A draft d, drawn from q, is accepted with probability min(1, p(d) / q(d)); the first that is not is replaced
by a draw from max(p - q, 0), normalised, and ends the step. When all are accepted a bonus token follows.
Drafts that were proposed with certainty (n-gram, suffix) have q(d) = 1. Greedy: accepted while the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.triton.random import (
    ACCEPT,
    RESIDUAL,
    exponential,
    exponential_reference,
    uniform,
    uniform_reference,
)

BLOCK = 4096


@triton.jit
def _replace(target, draft_probs, draft, seed, position, HAS_Q: tl.constexpr, VOCAB: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """A draw from what of p lies above q."""
    lead, best = -1.0, 0
    for start in range(0, VOCAB, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < VOCAB
        p = tl.load(target + columns, mask=inside, other=0.0)
        if HAS_Q:
            rest = tl.maximum(p - tl.load(draft_probs + columns, mask=inside, other=0.0), 0.0)
        else:
            rest = tl.where(columns == draft, 0.0, p)
        race = tl.where(inside, rest / exponential(seed, columns, position, 2), -1.0)
        top = tl.max(race, axis=0)
        first = tl.min(tl.where(race == top, columns, VOCAB), axis=0)
        best = tl.where(top > lead, first, best)
        lead = tl.maximum(top, lead)
    # Rounding may leave nothing of a residual that is as good as empty: then p is q, and the draft will do.
    return tl.where(lead > 0.0, best, draft)


@triton.jit
def _reject(
    target,
    draft_probs,
    drafts,
    draft_start,
    greedy,
    bonus,
    seeds,
    positions,
    tokens,
    counts,
    HAS_Q: tl.constexpr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One request: its drafts one after the other, until one is rejected."""
    request = tl.program_id(0)
    first, stop = tl.load(draft_start + request), tl.load(draft_start + request + 1)
    is_greedy = tl.load(greedy + request) != 0
    seed, position = tl.load(seeds + request), tl.load(positions + request)
    count, alive = 0, first >= 0
    for place in range(first, stop):
        if alive:
            offset = place - first
            row = (first.to(tl.int64) + offset) * VOCAB
            draft = tl.load(drafts + place)
            p = tl.load(target + row + draft)
            if is_greedy:
                # The target is one-hot: whatever has no weight is not the argmax.
                alive = p > 0.5
            else:
                q = tl.load(draft_probs + row + draft) if HAS_Q else 1.0
                u = uniform(seed, tl.zeros([1], dtype=tl.int32), position + offset, 1)
                alive = tl.max(u, axis=0) * q < p
            token = draft
            if not alive:
                p_row, q_row = target + row, draft_probs + row
                token = _replace(p_row, q_row, draft, seed, position + offset, HAS_Q, VOCAB, BLOCK)
            tl.store(tokens + request * WIDTH + count, token)
            count += 1
    if alive:
        tl.store(tokens + request * WIDTH + count, tl.load(bonus + request))
        count += 1
    tl.store(counts + request, count)


@dataclass(frozen=True)
class Drafts:
    """Drafts of B requests end to end, N in all, on the device.

    int32 ``tokens`` [N], ``start`` [B + 1]; of each request int32 ``greedy`` (0 or 1), ``bonus`` (what
    follows if all are accepted) and ``position`` (the first draft's place in the output), int64 ``seed`` [B].
    ``probs`` fp32 [N, vocab]: what each draft was drawn from; None: proposed with certainty.
    """

    tokens: torch.Tensor
    start: torch.Tensor
    greedy: torch.Tensor
    bonus: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    probs: torch.Tensor | None = None


def reject(target: torch.Tensor, drafts: Drafts, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What each request emits: int32 [B, longest + 1], and how many of these columns count [B].

    ``target`` fp32 [N, vocab], contiguous: the model's distribution at each draft, one-hot where greedy.
    ``longest``: the most drafts that one request has.
    """
    requests, vocab = len(drafts.greedy), target.shape[-1]
    tokens = torch.full((requests, longest + 1), -1, dtype=torch.int32, device=target.device)
    counts = torch.zeros(requests, dtype=torch.int32, device=target.device)
    if requests:
        _reject[(requests,)](
            target,
            target if drafts.probs is None else drafts.probs,
            drafts.tokens,
            drafts.start,
            drafts.greedy,
            drafts.bonus,
            drafts.seed,
            drafts.position,
            tokens,
            counts,
            HAS_Q=drafts.probs is not None,
            VOCAB=vocab,
            WIDTH=longest + 1,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return tokens, counts


def reject_reference(target: torch.Tensor, drafts: Drafts) -> list[list[int]]:
    """What each request emits."""
    starts = drafts.start.tolist()
    return [
        _reject_one(target, drafts, request, range(starts[request], starts[request + 1]))
        for request in range(len(drafts.greedy))
    ]


def _reject_one(target: torch.Tensor, drafts: Drafts, request: int, places: Sequence[int]) -> list[int]:
    emitted: list[int] = []
    seed, position = int(drafts.seed[request]), int(drafts.position[request])
    for offset, place in enumerate(places):
        p, draft = target[place].cpu(), int(drafts.tokens[place])
        q = torch.zeros_like(p).index_fill(0, torch.tensor([draft]), 1.0)
        if drafts.probs is not None:
            q = drafts.probs[place].cpu()
        if drafts.greedy[request]:
            accepted = int(p.argmax()) == draft
        else:
            u = uniform_reference(seed, np.zeros(1, dtype=np.int64), position + offset, ACCEPT)
            accepted = bool(u * q[draft] < p[draft])
        if accepted:
            emitted.append(draft)
            continue
        race = exponential_reference(seed, np.arange(len(p)), position + offset, RESIDUAL)
        rest = (p - q).clamp_min(0.0)
        return [*emitted, int((rest / race).argmax()) if rest.any() else draft]
    return [*emitted, int(drafts.bonus[request])]
