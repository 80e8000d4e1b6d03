"""Both kernels of a shape, and ragged batches for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.base import AttentionShape, Batch, Kernels
from engine.kernels.cpu import TorchKernels
from engine.kernels.native import NativeKernels
from engine.models.model import rope_tables
from engine.models.rope import RopeConfig


def both(shape: AttentionShape, dtype: torch.dtype) -> tuple[Kernels, Kernels]:
    cos, sin = rope_tables(RopeConfig(theta=100.0), shape.head_dim, 512)
    return TorchKernels(shape, dtype, cos, sin), NativeKernels(shape, dtype, cos, sin)


def offsets(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def make_batch(tables: list[list[int]], starts: list[int], counts: list[int], block_size: int) -> Batch:
    positions = [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, places in zip(tables, positions, strict=True)
        for position in places
    ]
    return Batch(
        positions=np.array([position for places in positions for position in places], dtype=np.int32),
        slots=np.array(slots, dtype=np.int32),
        query_start=offsets(counts),
        context_lens=np.array([a + b for a, b in zip(starts, counts, strict=True)], dtype=np.int32),
        tables=np.array([block for table in tables for block in table], dtype=np.int32),
        table_start=offsets([len(table) for table in tables]),
    )
