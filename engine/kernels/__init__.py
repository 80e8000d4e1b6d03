"""Kernels: the operations of a decoder layer, for each device."""

from __future__ import annotations

import torch

from engine.kernels.base import AttentionShape, Kernels


def make_kernels(shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor) -> Kernels:
    """The fastest kernels that this machine has for ``shape`` and ``dtype``."""
    from engine.kernels.cpu import TorchKernels

    return TorchKernels(shape, dtype, cos, sin)
