"""Kernels: the operations of a decoder layer, for each device."""

from __future__ import annotations

import logging

import torch

from engine.kernels.base import AttentionShape, Kernels

logger = logging.getLogger("vtune.kernels")

_ANY_SHAPE = AttentionShape(1, 1, 32, 16, 1.0)
_NO_TABLES = torch.zeros(1, 16), torch.zeros(1, 16)
"""For kernels that attend to nothing: one shape and its rotary tables that every set of kernels has."""


def make_kernels(
    shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor, int8: bool = False
) -> Kernels:
    """The fastest kernels that this machine has for ``shape`` and ``dtype``; ``int8``: see int8.py."""
    from engine.kernels.cpu import TorchKernels
    from engine.kernels.native import NativeKernels, NativeUnavailable
    from engine.kernels.split import SplitKernels

    try:
        kernels = NativeKernels(shape, dtype, cos, sin, int8)
        # What is left to torch is small, and two pools of threads would fight over the same cores.
        torch.set_num_threads(1)
        return kernels
    except NativeUnavailable as reason:
        logger.info("no C++ attention (%s): using torch's", reason)
    attention = TorchKernels(shape, dtype, cos, sin, int8)
    try:
        return SplitKernels(NativeKernels(_ANY_SHAPE, dtype, *_NO_TABLES, int8), attention)
    except NativeUnavailable as reason:
        logger.info("no C++ linear layers (%s): using torch's", reason)
        return attention
