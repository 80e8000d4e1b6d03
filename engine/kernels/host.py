"""KV blocks in host memory: copied out of the device's caches, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch


class HostBlocks:
    """Room for ``num_blocks`` blocks of every layer, in the layout of the device's ``caches``.

    Memory is taken as it is first written (on CUDA at once, as it is pinned).
    """

    def __init__(self, caches: Sequence[Any], num_blocks: int) -> None:
        self._device = [tensor for cache in caches for tensor in block_tensors(cache)]
        self._host = [
            torch.empty((num_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            for tensor in self._device
        ]

    def swap(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        """Copy blocks ``out``: (on the device, on the host); then others ``back``: (on the host, on the
        device), which may be where those were."""
        if out:
            _copy(self._device, self._host, out)
        if back:
            _copy(self._host, self._device, back)


def _copy(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    """``target[j] = source[i]`` for every pair (i, j), in every layer."""
    taken, put = torch.tensor(pairs).unbind(1)
    for source, target in zip(sources, targets, strict=True):
        target[put.to(target.device)] = source[taken.to(source.device)].to(target.device)


def block_tensors(cache: Any) -> Iterator[torch.Tensor]:
    """Every tensor of a layer's cache, with blocks as the first dimension in every layout."""
    for field in fields(cache):
        value = getattr(cache, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from block_tensors(value)
