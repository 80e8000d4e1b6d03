"""Random paged caches and ragged batches for the attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from triton_interpreter import attention

from engine.kernels.base import AttentionShape
from engine.kernels.cpu import Paged, TorchCache


@dataclass(frozen=True)
class Problem:
    """Sequences with ``counts`` queries after ``pasts`` tokens each, and a cache full of keys and values."""

    shape: AttentionShape
    q: torch.Tensor
    cache: TorchCache
    batch: attention.Ragged

    def tiles(self, sequences: Sequence[int], tiling: attention.Tiling, segments: int = 1) -> attention.Tiles:
        """Tiles over all queries of some sequences."""
        starts, step = self.batch.query_start.tolist(), tiling.tokens(self.shape.group)
        pairs = [(s, first) for s in sequences for first in range(starts[s], starts[s + 1], step)]
        columns = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2).T.contiguous()
        return attention.Tiles(columns[0], columns[1], tiling, segments)


def make_problem(
    shape: AttentionShape,
    pasts: Sequence[int],
    counts: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Problem:
    generator = torch.Generator().manual_seed(0)
    contexts = [past + count if count else 0 for past, count in zip(pasts, counts, strict=True)]
    widths = [-(-context // shape.block_size) for context in contexts]
    blocks = torch.randperm(sum(widths), generator=generator) + 1
    keys, values = (Paged.allocate(shape, dtype, sum(widths) + 1) for _ in range(2))
    cache = TorchCache(keys, values, kind=0)
    slots = torch.arange(1, sum(widths) + 1).repeat_interleave(shape.block_size)
    offsets_in_block = torch.arange(len(slots)) % shape.block_size
    for paged in (cache.keys, cache.values):
        content = torch.randn(len(slots), shape.num_kv_heads, shape.head_dim, generator=generator)
        paged.write(content.to(dtype), slots, offsets_in_block)

    def offsets(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0, *values]).cumsum(0).to(torch.int32)

    batch = attention.Ragged(
        offsets(counts), torch.tensor(contexts, dtype=torch.int32), blocks.to(torch.int32), offsets(widths)
    )
    q = torch.randn(sum(counts), shape.query_size + 2 * shape.kv_size, generator=generator).to(dtype)
    return Problem(shape, q, cache, batch)
