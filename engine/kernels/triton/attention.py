"""Attention of a ragged batch over the paged cache: prefill, decode and what lies between.

The unit of work is a *tile*: some consecutive queries of one sequence, with all query heads of one KV head.
Tokens and heads are packed into the rows of one matrix, so that a key that is read serves the whole group.

- ``_attention``: a program a (tile, KV head) walks over all keys that the tile sees.
- ``_attention_split``: the keys of short tiles are cut into segments that are walked in parallel, since a few
  sequences alone would leave most of a GPU idle (flash-decoding, https://pytorch.org/blog/flash-decoding).
- ``_reduce``: joins the segments.

The softmax is the online one (arXiv:1805.02867), in base 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.base import AttentionShape
from engine.kernels.cpu import TorchCache
from engine.kernels.triton.activation import tanh
from engine.kernels.triton.quantise import code_of, widen
from engine.kernels.triton.rope import pointers

MIN_ROWS = 16
"""The fewest rows that tensor cores multiply."""

MAX_SEGMENTS = 16


@triton.jit
def _queries(q, first, end, kv_head, q_stride, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
             DIM_BLOCK: tl.constexpr):  # fmt: skip
    """A tile's rows: the queries, their tokens in the batch, their heads, and which rows are real."""
    rows = tl.arange(0, ROWS)
    tokens = first + rows // GROUP
    real = (tokens < end) & (rows < (ROWS // GROUP) * GROUP)
    heads = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, DIM_BLOCK)
    places = tokens.to(tl.int64)[:, None] * q_stride + (heads * DIM)[:, None] + columns[None, :]
    queries = tl.load(q + places, mask=real[:, None] & (columns < DIM)[None, :], other=0.0)
    return queries, tokens, heads, real


@triton.jit
def _walk(
    queries,
    positions,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv_head,
    begin,
    end,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Attend to the keys ``[begin, end)``: unnormalised sums [ROWS, DIM_BLOCK], row maxima and row totals."""
    sums = tl.zeros([ROWS, DIM_BLOCK], dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    columns = tl.arange(0, DIM_BLOCK)
    inside = columns < DIM
    for start in range(begin, end, COLUMNS):
        places = start + tl.arange(0, COLUMNS)
        exist = places < end
        blocks = tl.load(table + places // BLOCK_SIZE, mask=exist, other=0).to(tl.int64)
        rows = (blocks * KV_HEADS + kv_head) * BLOCK_SIZE + places % BLOCK_SIZE
        key = tl.load(
            keys + rows[None, :] * DIM + columns[:, None], mask=exist[None, :] & inside[:, None], other=0
        )
        scores = tl.dot(queries, widen(key, KV, queries.dtype), input_precision="ieee") * scale
        if SCALED:
            scores *= tl.load(key_scales + rows, mask=exist, other=0.0)[None, :]
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        seen = exist[None, :] & (places[None, :] <= positions[:, None])
        if WINDOW > 0:
            seen = seen & (places[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet (outside its window, or padding) would give inf - inf.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(peak - level)
        total = total * shrink + tl.sum(weights, axis=1)
        peak = higher
        value = tl.load(
            values + rows[:, None] * DIM + columns[None, :], mask=exist[:, None] & inside[None, :], other=0
        )
        if SCALED:
            weights *= tl.load(value_scales + rows, mask=exist, other=0.0)[None, :]
        weights = weights.to(queries.dtype)
        sums = tl.dot(
            weights, widen(value, KV, queries.dtype), sums * shrink[:, None], input_precision="ieee"
        )
    return sums, peak, total


@triton.jit
def _reach(first_position, last_position, COLUMNS: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that a tile's queries see, from a whole tile of keys on."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // COLUMNS * COLUMNS
    return begin, last_position + 1


@triton.jit
def _attention(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    out,
    tile_sequence,
    tile_first,
    query_start,
    context_lens,
    tables,
    table_start,
    q_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
    SCALED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    stop = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    if context > 0:  # a padded sequence of a captured graph has none
        queries, tokens, heads, real = _queries(
            q, first, stop, kv_head, q_stride, GROUP, DIM, ROWS, DIM_BLOCK
        )
        positions = tokens + (context - stop)
        last = tl.minimum(first + ROWS // GROUP, stop) - 1 + (context - stop)
        begin, end = _reach(first + (context - stop), last, COLUMNS, WINDOW)
        table = tables + tl.load(table_start + sequence)
        sums, _, total = _walk(
            queries, positions, keys, values, key_scales, value_scales, table, kv_head, begin, end, scale,
            softcap, KV_HEADS, DIM, DIM_BLOCK, BLOCK_SIZE, ROWS, COLUMNS, WINDOW, SOFTCAP, KV, SCALED,
        )  # fmt: skip
        found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        columns = tl.arange(0, DIM_BLOCK)
        places = (tokens.to(tl.int64) * HEADS + heads)[:, None] * DIM + columns[None, :]
        tl.store(out + places, found.to(out.dtype.element_ty), mask=real[:, None] & (columns < DIM)[None, :])


@triton.jit
def _segment(begin, end, segment, SEGMENTS: tl.constexpr, COLUMNS: tl.constexpr):
    """The part of ``[begin, end)`` that a segment walks, in whole tiles of keys; empty for the last ones of
    a short context."""
    each = tl.cdiv(tl.cdiv(end - begin, COLUMNS), SEGMENTS) * COLUMNS
    start = begin + segment * each
    return start, tl.minimum(start + each, end)


@triton.jit
def _attention_split(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    part_sums,
    part_peaks,
    part_totals,
    tile_sequence,
    tile_first,
    query_start,
    context_lens,
    tables,
    table_start,
    q_stride,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    KV: tl.constexpr,
    SCALED: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    stop = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    last = tl.minimum(first + ROWS // GROUP, stop) - 1 + (context - stop)
    begin, end = _reach(first + (context - stop), last, COLUMNS, WINDOW)
    begin, end = _segment(begin, end, segment, SEGMENTS, COLUMNS)
    if (context > 0) & (begin < end):
        queries, tokens, _, _ = _queries(q, first, stop, kv_head, q_stride, GROUP, DIM, ROWS, DIM_BLOCK)
        table = tables + tl.load(table_start + sequence)
        sums, peak, total = _walk(
            queries, tokens + (context - stop), keys, values, key_scales, value_scales, table, kv_head, begin,
            end, scale, softcap, KV_HEADS, DIM, DIM_BLOCK, BLOCK_SIZE, ROWS, COLUMNS, WINDOW, SOFTCAP, KV,
            SCALED,
        )  # fmt: skip
        rows = ((tile.to(tl.int64) * KV_HEADS + kv_head) * SEGMENTS + segment) * ROWS + tl.arange(0, ROWS)
        columns = tl.arange(0, DIM_BLOCK)
        tl.store(part_sums + rows[:, None] * DIM_BLOCK + columns[None, :], sums)
        tl.store(part_peaks + rows, peak)
        tl.store(part_totals + rows, total)


@triton.jit
def _reduce(
    part_sums,
    part_peaks,
    part_totals,
    out,
    tile_sequence,
    tile_first,
    query_start,
    context_lens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One head of one token: the segments' sums, each scaled to the highest of their maxima."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, head, place = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    stop = tl.load(query_start + sequence + 1)
    context = tl.load(context_lens + sequence)
    if (context > 0) & (first + place < stop):
        last = tl.minimum(first + ROWS // GROUP, stop) - 1 + (context - stop)
        begin, end = _reach(first + (context - stop), last, COLUMNS, WINDOW)
        segments = tl.arange(0, SEGMENTS)
        starts, stops = _segment(begin, end, segments, SEGMENTS, COLUMNS)
        written = starts < stops
        row = place * GROUP + head % GROUP
        rows = ((tile.to(tl.int64) * KV_HEADS + head // GROUP) * SEGMENTS + segments) * ROWS + row
        columns = tl.arange(0, DIM_BLOCK)
        peaks = tl.load(part_peaks + rows, mask=written, other=float("-inf"))
        scale = tl.exp2(peaks - tl.max(peaks, axis=0))
        total = tl.sum(tl.load(part_totals + rows, mask=written, other=0.0) * scale, axis=0)
        sums = tl.load(
            part_sums + rows[:, None] * DIM_BLOCK + columns[None, :], mask=written[:, None], other=0.0
        )
        found = tl.sum(sums * scale[:, None], axis=0) / total
        to = out + ((first + place).to(tl.int64) * HEADS + head) * DIM + columns
        tl.store(to, found.to(out.dtype.element_ty), mask=columns < DIM)


@dataclass(frozen=True)
class Tiling:
    """A program's work: rows (tokens x heads of a group) by columns (keys), and how it is compiled."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def tokens(self, group: int) -> int:
        """Query tokens of a tile."""
        return self.rows // group


def long_tiling(shape: AttentionShape, itemsize: int) -> Tiling:
    """For prefill: as many rows as registers hold beside a tile of keys. 64 rows a warp group are what
    sm_90's wgmma multiplies."""
    width = triton.next_power_of_2(shape.head_dim)
    least = triton.next_power_of_2(shape.group)
    if itemsize > 2:
        return Tiling(max(32, least), 32, 4, 1)
    if width > 128:
        return Tiling(max(64, least), 32, 4, 2)
    if code_of(shape.kv_format):  # widening takes registers: with more columns they spill
        return Tiling(max(128, least), 32, 8, 1 if shape.kv_format.scaled else 2)
    return Tiling(max(128, least), 64, 8, 2)


def short_tiling(shape: AttentionShape, itemsize: int) -> Tiling:
    """For decode: the fewest rows that hold one token's heads, since it waits for the keys' bytes."""
    width = triton.next_power_of_2(shape.head_dim) * itemsize
    rows = max(MIN_ROWS, triton.next_power_of_2(shape.group))
    wide = width <= 256 and not code_of(shape.kv_format)
    return Tiling(rows, 64 if wide else 32, 4, 2 if width <= 512 else 1)


def num_segments(num_tiles: int, shape: AttentionShape, processors: int, longest: int, tiling: Tiling) -> int:
    """Segments for short tiles: about four programs a processor, none shorter than four tiles of keys.

    A power of 2, for the reduction. ``longest`` is the longest context, in tokens.
    """
    wanted = 4 * processors // max(num_tiles * shape.num_kv_heads, 1)
    useful = longest // (4 * tiling.columns)
    most = min(wanted, useful, MAX_SEGMENTS)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


@dataclass(frozen=True)
class Tiles:
    """Tiles on the device, int32: the sequence of each, and its first query token's row in the batch."""

    sequence: torch.Tensor
    first: torch.Tensor
    tiling: Tiling
    segments: int = 1


@dataclass(frozen=True)
class Ragged:
    """A batch on the device, int32; see ``kernels.base.Batch``."""

    query_start: torch.Tensor
    context_lens: torch.Tensor
    tables: torch.Tensor
    table_start: torch.Tensor


def attention(
    q: torch.Tensor,
    cache: TorchCache,
    batch: Ragged,
    tiles: Tiles,
    out: torch.Tensor,
    shape: AttentionShape,
) -> None:
    """Attend the queries of ``tiles``: rows of ``q`` [T, >= H * D] into rows of ``out`` [T, H * D].

    Window and soft cap are the shape's, for the cache's kind.
    """
    softcap, window = shape.softcap or 0.0, shape.windows[cache.kind] or 0
    count, tiling = len(tiles.sequence), tiles.tiling
    if not count:
        return
    where = (tiles.sequence, tiles.first, batch.query_start, batch.context_lens)
    inputs = (q, *pointers(cache))
    rest = (batch.tables, batch.table_start, q.stride(0), shape.scale, softcap)
    sizes = {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "DIM": shape.head_dim,
        "DIM_BLOCK": max(triton.next_power_of_2(shape.head_dim), 16),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WINDOW": window,
    }
    options = {
        "BLOCK_SIZE": shape.block_size,
        "SOFTCAP": softcap > 0.0,
        "KV": code_of(shape.kv_format),
        "SCALED": shape.kv_format.scaled,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        "enable_fp_fusion": True,
    }
    if tiles.segments == 1:
        _attention[(count, shape.num_kv_heads)](*inputs, out, *where, *rest, **sizes, **options)
        return
    parts = _partials(count, tiles.segments, tiling.rows, sizes["DIM_BLOCK"], shape, q.device)
    grid = (count, shape.num_kv_heads, tiles.segments)
    _attention_split[grid](*inputs, *parts, *where, *rest, SEGMENTS=tiles.segments, **sizes, **options)
    grid = (count, shape.num_heads, tiling.tokens(shape.group))
    _reduce[grid](*parts, out, *where, SEGMENTS=tiles.segments, **sizes, num_warps=2, enable_fp_fusion=True)


def _partials(
    tiles: int, segments: int, rows: int, width: int, shape: AttentionShape, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums, maxima and totals of every segment's rows, uninitialised."""
    count = tiles * shape.num_kv_heads * segments * rows
    parts = (torch.empty(size, dtype=torch.float32, device=device) for size in (count * width, count, count))
    sums, peaks, totals = parts
    return sums, peaks, totals


def attention_reference(
    q: torch.Tensor,
    cache: TorchCache,
    batch: Ragged,
    shape: AttentionShape,
) -> torch.Tensor:
    """[T, H * D] in fp32, one sequence at a time."""
    softcap, window = shape.softcap, shape.windows[cache.kind]
    found = torch.zeros(len(q), shape.query_size, device=q.device)
    starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
    for sequence, context in enumerate(contexts):
        first, stop = starts[sequence], starts[sequence + 1]
        if first == stop or not context:
            continue
        begin = int(batch.table_start[sequence])
        blocks = batch.tables[None, begin : begin + -(-context // shape.block_size)]
        halves = (half.gather(blocks, torch.float32)[0, :, :context] for half in (cache.keys, cache.values))
        keys, values = (half.float() for half in halves)
        queries = q[first:stop, : shape.query_size].float().unflatten(-1, (-1, shape.head_dim))
        scores = torch.einsum("thd,hnd->htn", queries, keys.repeat_interleave(shape.group, 0)) * shape.scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        places = torch.arange(context, device=q.device)
        positions = (torch.arange(first, stop, device=q.device) + context - stop)[:, None]
        seen = places <= positions
        if window:
            seen &= places > positions - window
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        attended = torch.einsum("htn,hnd->thd", weights, values.repeat_interleave(shape.group, 0))
        found[first:stop] = attended.flatten(1)
    return found
