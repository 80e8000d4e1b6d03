"""Kernels: the operations of a decoder layer, for each device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from engine.kernels.base import AttentionShape, Kernels
from engine.kernels.device import pick_device

logger = logging.getLogger("vtune.kernels")

_ANY_SHAPE = AttentionShape(1, 1, 32, 16, 1.0)
_NO_TABLES = torch.zeros(1, 16), torch.zeros(1, 16)
"""For kernels that attend to nothing: one shape and its rotary tables that every set of kernels has."""


def make_kernels(
    shape: AttentionShape,
    dtype: torch.dtype,
    cos: torch.Tensor,
    sin: torch.Tensor,
    int8: bool = False,
    graph_sizes: Sequence[int] = (),
) -> Kernels:
    """The fastest kernels that this machine has for ``shape`` and ``dtype``; ``int8``: see int8.py.

    ``graph_sizes``: the batch sizes of decode steps that a GPU records graphs of.
    """
    if (device := pick_device()).type == "cuda":
        from engine.kernels.triton.kernels import TritonKernels

        return TritonKernels(shape, dtype, cos, sin, device, graph_sizes)
    from engine.kernels.cpu import TorchKernels
    from engine.kernels.native import NativeKernels, NativeUnavailable
    from engine.kernels.split import SplitKernels

    try:
        kernels = NativeKernels(shape, dtype, cos, sin, int8)
        torch.set_num_threads(
            1
        )  # small operations are left to torch, and two pools would fight over the cores
        return kernels
    except NativeUnavailable as reason:
        logger.info("no C++ attention (%s): using torch's", reason)
    attention = TorchKernels(shape, dtype, cos, sin, int8)
    try:
        layers = NativeKernels(_ANY_SHAPE, dtype, *_NO_TABLES, int8)
        torch.set_num_threads(1)
        return SplitKernels(layers, attention)
    except NativeUnavailable as reason:
        logger.info("no C++ linear layers (%s): using torch's", reason)
        return attention
