"""Kernels: the operations of a decoder layer, for each device."""

from __future__ import annotations

import logging

import torch

from engine.kernels.base import AttentionShape, Kernels

logger = logging.getLogger("vtune.kernels")


def make_kernels(shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor) -> Kernels:
    """The fastest kernels that this machine has for ``shape`` and ``dtype``."""
    from engine.kernels.cpu import TorchKernels
    from engine.kernels.native import NativeKernels, NativeUnavailable

    try:
        kernels = NativeKernels(shape, dtype, cos, sin)
        # What is left to torch is small, and two pools of threads would fight over the same cores.
        torch.set_num_threads(1)
        return kernels
    except NativeUnavailable as reason:
        logger.info("no C++ kernels (%s): using torch operations", reason)
        return TorchKernels(shape, dtype, cos, sin)
