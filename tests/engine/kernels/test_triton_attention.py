"""Attention kernels in Triton's interpreter against plain fp32 torch, over ragged batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_batches import Problem, make_problem
from triton_interpreter import attention

from engine.kernels.base import AttentionShape
from engine.kv.kv_format import KV_FORMATS

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SHAPES = {  # heads, KV heads, head_dim, block size
    "grouped by 3, 64": (6, 2, 64, 16),
    "multi-head, 80": (2, 2, 80, 32),
    "grouped by 4, 96": (4, 1, 96, 16),
    "grouped by 2, 128": (4, 2, 128, 32),
    "Gemma's width, 256": (2, 1, 256, 16),
    "tiny, 8": (3, 1, 8, 16),
    "one KV head of 20": (20, 1, 32, 32),
}


def make_shape(name: str) -> AttentionShape:
    heads, kv_heads, head_dim, block_size = SHAPES[name]
    return AttentionShape(heads, kv_heads, head_dim, block_size, head_dim**-0.5)


def check(problem: Problem, tiles: attention.Tiles) -> None:
    dtype = problem.q.dtype
    out = torch.zeros(len(problem.q), problem.shape.query_size, dtype=dtype)
    attention.attention(problem.q, problem.cache, problem.batch, tiles, out, problem.shape)
    expected = attention.attention_reference(problem.q, problem.cache, problem.batch, problem.shape)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_prefill_and_decode_in_one_launch(name: str, dtype: torch.dtype) -> None:
    """Chunks after a history, a first chunk, single tokens, and a sequence without any."""
    shape = make_shape(name)
    problem = make_problem(shape, [70, 0, 1, 0, 33], [45, 17, 1, 0, 3], dtype)
    check(problem, problem.tiles(range(5), attention.long_tiling(shape, dtype.itemsize)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_split_decode(name: str, dtype: torch.dtype) -> None:
    """More segments than short contexts have tiles of keys; drafts beside single tokens."""
    shape = make_shape(name)
    tiling = attention.short_tiling(shape, dtype.itemsize)
    drafts = min(3, tiling.tokens(shape.group))
    problem = make_problem(shape, [300, 0, 63, 64, 0, 130], [1, 1, 1, drafts, 0, drafts], dtype)
    check(problem, problem.tiles(range(6), tiling, segments=4))


@pytest.mark.parametrize("segments", [1, 2, 8, 16])
def test_segments_join_to_the_same(segments: int) -> None:
    shape = make_shape("grouped by 3, 64")
    problem = make_problem(shape, [700, 5], [1, 1])
    check(problem, problem.tiles(range(2), attention.short_tiling(shape, 4), segments))


@pytest.mark.parametrize("name", sorted(set(KV_FORMATS) - {"auto"}))
@pytest.mark.parametrize("segments", [1, 4])
def test_cache_formats(name: str, segments: int) -> None:
    shape = replace(make_shape("grouped by 3, 64"), kv_format=KV_FORMATS[name])
    problem = make_problem(shape, [90, 0, 200], [2, 3, 1])
    check(problem, problem.tiles(range(3), attention.short_tiling(shape, 4), segments))


@pytest.mark.parametrize("window", [1, 16, 50])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_window_and_softcap(window: int, softcap: float | None) -> None:
    shape = replace(make_shape("grouped by 4, 96"), windows=(window,), softcap=softcap)
    problem = make_problem(shape, [150, 0, 200], [40, 20, 1])
    check(problem, problem.tiles(range(3), attention.long_tiling(shape, 4)))
    decode = make_problem(shape, [150, 3, 200], [1, 1, 2])
    check(decode, decode.tiles(range(3), attention.short_tiling(shape, 4), segments=4))


def test_only_the_tiles_queries_are_written() -> None:
    shape = make_shape("tiny, 8")
    problem = make_problem(shape, [20, 9, 9], [4, 1, 30])
    out = torch.full((35, shape.query_size), torch.nan)
    expected = attention.attention_reference(problem.q, problem.cache, problem.batch, shape)
    for sequences, tiling, segments in (
        ([0, 2], attention.long_tiling(shape, 4), 1),
        ([1], attention.short_tiling(shape, 4), 2),
    ):
        before = out.clone()
        tiles = problem.tiles(sequences, tiling, segments)
        attention.attention(problem.q, problem.cache, problem.batch, tiles, out, shape)
        own = torch.zeros(35, dtype=torch.bool)
        for s in sequences:
            own[problem.batch.query_start[s] : problem.batch.query_start[s + 1]] = True
        torch.testing.assert_close(out[own], expected[own], atol=2e-5, rtol=2e-5)
        assert torch.equal(out[~own].isnan(), before[~own].isnan())


def test_no_tiles_no_launch() -> None:
    shape = make_shape("tiny, 8")
    problem = make_problem(shape, [0], [1])
    out = torch.full((1, shape.query_size), 7.0)
    none = problem.tiles([], attention.long_tiling(shape, 4))
    attention.attention(problem.q, problem.cache, problem.batch, none, out, shape)
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    ("tiles", "longest", "expected"),
    [
        (1, 8192, 16),  # one sequence: as many as there may be
        (1, 200, 1),  # too short to be worth a second pass
        (1, 1024, 4),
        (64, 8192, 2),
        (512, 8192, 1),  # the sequences alone fill the device
        (0, 0, 1),
    ],
)
def test_segments_fill_the_device(tiles: int, longest: int, expected: int) -> None:
    shape = make_shape("grouped by 2, 128")
    tiling = attention.short_tiling(shape, 2)
    assert attention.num_segments(tiles, shape, 80, longest, tiling) == expected
