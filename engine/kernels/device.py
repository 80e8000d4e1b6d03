"""Which device computes, what it has, and which batch sizes it records graphs of."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from contextlib import AbstractContextManager

import numpy as np
import torch

from engine.config import GIB, EngineConfig
from engine.errors import ConfigError
from engine.kernels.base import Batch, Kernels
from engine.sampling.sampler import Sampler

CPU = torch.device("cpu")

logger = logging.getLogger("vtune.kernels")

LARGEST_DEFAULT_CAPTURE_SIZE = 512
"""vLLM's, on every GPU but Blackwell."""


def pick_device() -> torch.device:
    """The first GPU that torch and Triton can use, else the CPU. ``CUDA_VISIBLE_DEVICES=`` hides GPUs."""
    if not torch.cuda.is_available():
        return CPU
    if importlib.util.find_spec("triton") is None:
        logger.warning("a GPU is here, but not triton (pip install triton): using the CPU")
        return CPU
    return torch.device("cuda", torch.cuda.current_device())


def memory_of(device: torch.device) -> int:
    """The device's memory in bytes, used or free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_by_others(device: torch.device) -> int:
    """Bytes of a GPU that are in use but not torch's: libraries, kernels, other processes."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free - torch.cuda.memory_reserved(device))


def place_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which tensors are made on the device by default."""
    return contextlib.nullcontext() if device.type == "cpu" else device


def idle_batch(sequences: int, each: int) -> Batch:
    """Sequences of ``each`` tokens that read no cache and write none."""
    tokens = sequences * each
    return Batch(
        positions=np.zeros(tokens, dtype=np.int32),
        slots=np.full(tokens, -1, dtype=np.int32),
        query_start=np.arange(0, tokens + 1, each, dtype=np.int32),
        context_lens=np.zeros(sequences, dtype=np.int32),
        tables=np.zeros(0, dtype=np.int32),
        table_start=np.zeros(sequences + 1, dtype=np.int32),
    )


def make_sampler(seed: int, kernels: Kernels) -> Sampler:
    """The sampler of the device that ``kernels`` are for."""
    if kernels.device.type == "cpu":
        return Sampler(seed, kernels.argmax)
    from engine.kernels.triton.sampler import DeviceSampler

    return DeviceSampler(seed)


def check_free_memory(device: torch.device, utilization: float) -> None:
    """Raise ConfigError where other processes use memory that ``gpu_memory_utilization`` counts on."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if free < utilization * total:
        raise ConfigError(
            "gpu_memory_utilization",
            utilization,
            f"of {total / GIB:.1f} GiB is more than the {free / GIB:.1f} GiB that are free on {device}",
            f"lower it to {int(100 * free / total) / 100}, or stop what else uses the GPU",
        )


def capture_sizes(config: EngineConfig, device: torch.device) -> tuple[int, ...]:
    """The batch sizes that decode steps are padded to, ascending, by vLLM's rules; empty: no graphs."""
    if device.type != "cuda" or config.enforce_eager:
        return ()
    budget = config.max_num_batched_tokens
    if config.cudagraph_capture_sizes is not None:
        return tuple(sorted({size for size in config.cudagraph_capture_sizes if size <= budget}))
    largest = config.max_cudagraph_capture_size
    if largest is None:
        largest = min(2 * config.max_num_seqs, LARGEST_DEFAULT_CAPTURE_SIZE)
    largest = min(largest, budget)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)}
    if budget <= largest:
        sizes.add(budget)
    return tuple(sorted(size for size in sizes if size <= largest))


def warn_of_unused(config: EngineConfig, device: torch.device) -> None:
    """Warn of flags that have no effect on the device."""
    if device.type == "cuda":
        return
    for flag in ("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(config, flag):
            logger.warning("--%s has no effect on the CPU: it records no graphs", flag.replace("_", "-"))
