"""A token for each row of logits: temperature, min-p, top-k, top-p, draw. Nothing is sorted.

What top-k and top-p keep is everything from some logit on. That logit is found by its bits, from the highest
to the lowest: 32 times the row is read (it stays in the cache) and counted, or its mass summed, exactly and
without memory. Where logits are equal at the edge all of them are kept; a sort would keep some of them.
The draw is an exponential race (equivalent to Gumbel's): the column with the highest weight / exponential.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.triton.random import TOKEN, exponential, exponential_reference

BLOCK = 4096
"""Columns that a program looks at together."""


@triton.jit
def _order(x):
    """fp32 as unsigned numbers in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _scaled(row, start, temperature, low, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Columns ``start`` on: their numbers, and their logits over temperature, -inf below ``low``."""
    columns = start + tl.arange(0, BLOCK)
    x = tl.load(row + columns, mask=columns < VOCAB, other=float("-inf")) / temperature
    return columns, tl.where(x >= low, x, float("-inf"))


@triton.jit
def _edge(row, temperature, low, peak, wanted, MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The highest edge (by ``_order``) from which on there are ``wanted`` columns, or so much mass."""
    edge = tl.full([1], 0, dtype=tl.uint32)
    bit = tl.full([1], 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        tried = edge | bit
        found = 0.0
        for start in range(0, VOCAB, BLOCK):
            _columns, x = _scaled(row, start, temperature, low, VOCAB, BLOCK)
            kept = (_order(x) >= tried) & (x > float("-inf"))
            found += tl.sum(tl.where(kept, tl.exp(x - peak) if MASS else 1.0, 0.0), axis=0)
        edge = tl.where(found >= wanted, tried, edge)
        bit = bit >> 1
    return edge


@triton.jit
def _sample(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    tokens,
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = logits + place.to(tl.int64) * logits_stride
    temperature = tl.load(temperatures + place)
    drawn = temperature > 0.0
    temperature = tl.where(drawn, temperature, 1.0)
    low = float("-inf")
    peak, best = float("-inf"), 0
    for start in range(0, VOCAB, BLOCK):
        columns, x = _scaled(row, start, temperature, low, VOCAB, BLOCK)
        top = tl.max(x, axis=0)
        first = tl.min(tl.where(x == top, columns, VOCAB), axis=0)
        best = tl.where(top > peak, first, best)
        peak = tl.maximum(top, peak)
    if drawn:
        min_p = tl.load(min_ps + place)
        low = tl.where(min_p > 0.0, peak + tl.log(tl.where(min_p > 0.0, min_p, 1.0)), low)
        edge = tl.full([1], 0, dtype=tl.uint32)
        top_k = tl.load(top_ks + place)
        if (top_k > 0) & (top_k < VOCAB):
            edge = _edge(row, temperature, low, peak, top_k.to(tl.float32), False, VOCAB, BLOCK)
        top_p = tl.load(top_ps + place)
        if top_p < 1.0:
            total = 0.0
            for start in range(0, VOCAB, BLOCK):
                _columns, x = _scaled(row, start, temperature, low, VOCAB, BLOCK)
                total += tl.sum(tl.where(_order(x) >= edge, tl.exp(x - peak), 0.0), axis=0)
            # No column lies between the two edges' sets: an edge below top-k's has all of its mass.
            edge = tl.maximum(edge, _edge(row, temperature, low, peak, top_p * total, True, VOCAB, BLOCK))
        seed, position = tl.load(seeds + place), tl.load(positions + place)
        lead = float("-inf")
        for start in range(0, VOCAB, BLOCK):
            columns, x = _scaled(row, start, temperature, low, VOCAB, BLOCK)
            race = x - tl.log(exponential(seed, columns, position, 0))
            race = tl.where(_order(x) >= edge, race, float("-inf"))
            top = tl.max(race, axis=0)
            first = tl.min(tl.where(race == top, columns, VOCAB), axis=0)
            best = tl.where(top > lead, first, best)
            lead = tl.maximum(top, lead)
    tl.store(tokens + place, best)


@dataclass(frozen=True)
class Draws:
    """How each of R rows is chosen from, all [R] on the device.

    fp32 ``temperature`` (0: the argmax), ``top_p`` and ``min_p`` (1 and 0: off); int32 ``top_k`` (0: off) and
    ``position``, the token's place in the output; int64 ``seed``.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def sample(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The chosen columns, int32 [R], of fp32 ``logits`` [R, vocab], which stay as they are."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _sample[(rows,)](
            logits,
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seed,
            draws.position,
            tokens,
            logits.stride(0),
            VOCAB=vocab,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
            num_warps=8,
            enable_fp_fusion=True,
        )
    return tokens


def sample_reference(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    """The same by sorting, row by row."""
    tokens = []
    for row, x in enumerate(logits):
        temperature, vocab = float(draws.temperature[row]), len(x)
        if temperature == 0.0:
            tokens.append(int(x.argmax()))
            continue
        x = x / temperature
        if min_p := float(draws.min_p[row]):
            x = x.masked_fill(x < x.max() + np.log(min_p), -torch.inf)
        if 0 < (top_k := int(draws.top_k[row])) < vocab:
            x = x.masked_fill(x < x.topk(top_k).values[-1], -torch.inf)
        if (top_p := float(draws.top_p[row])) < 1.0:
            ordered = x.softmax(-1).sort(descending=True)
            outside = ordered.values.cumsum(-1) - ordered.values >= top_p
            x[ordered.indices[outside]] = -torch.inf
        race = exponential_reference(int(draws.seed[row]), np.arange(vocab), int(draws.position[row]), TOKEN)
        tokens.append(int((x.cpu() - race.log()).argmax()))
    return torch.tensor(tokens, dtype=torch.int32)
