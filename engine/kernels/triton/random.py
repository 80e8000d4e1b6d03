"""Random numbers by counter: Philox 4x32-10 (Salmon et al., SC'11), keyed by a seed.

The number for (seed, position, column) does not depend on the batch, the step or the launch, so that a seeded
request gives the same text alone and among others. Streams keep draws for different purposes apart.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

TOKEN, ACCEPT, RESIDUAL = 0, 1, 2
"""Streams: choosing a token, accepting a draft, replacing one."""


@triton.jit
def uniform(seed, columns, position, STREAM: tl.constexpr):
    """fp32 in (0, 1): fine-grained towards 0, and never 1."""
    zeros = columns * 0
    bits, _, _, _ = tl.philox(seed, columns, zeros + position, zeros + STREAM, zeros)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def exponential(seed, columns, position, STREAM: tl.constexpr):
    """Exponential with mean 1. Small ones, which win races, keep their relative precision: the winner among
    many columns is about 1 / columns."""
    u = uniform(seed, columns, position, STREAM)
    return tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * (0.33333334 + u * 0.25))), -tl.log(1.0 - u))


def uniform_reference(seed: int, columns: NDArray[np.int64], position: int, stream: int) -> torch.Tensor:
    """``uniform`` in numpy, from the paper; fp32."""
    bits = _philox(
        seed, [columns, np.full_like(columns, position), np.full_like(columns, stream), 0 * columns]
    )
    wide = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return torch.from_numpy(np.minimum(wide, np.float32(1 - 2.0**-24)))


def exponential_reference(seed: int, columns: NDArray[np.int64], position: int, stream: int) -> torch.Tensor:
    return -torch.log1p(-uniform_reference(seed, columns, position, stream))


def _philox(seed: int, counter: list[NDArray[np.int64]]) -> NDArray[np.uint64]:
    """The first of the four words of each counter, after ten rounds."""
    mask = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (word.astype(np.uint64) & mask for word in counter)
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c2 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(key[0]),
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(key[1]),
        )
        c1, c3 = second & mask, first & mask
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c0
