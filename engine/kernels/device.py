"""Which device computes, what it has, and which batch sizes it records graphs of."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from engine.config import GIB, ConfigError, EngineConfig

logger = logging.getLogger("vtune.kernels")

LARGEST_DEFAULT_CAPTURE = 512
"""vLLM's, on every GPU but Blackwell."""


def pick_device() -> torch.device:
    """The first GPU that torch and Triton can use, else the CPU. ``CUDA_VISIBLE_DEVICES=`` hides GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if importlib.util.find_spec("triton") is None:
        logger.warning("a GPU is here, but not triton (pip install triton): using the CPU")
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def memory_of(device: torch.device) -> int:
    """Bytes that the device has, whoever uses them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_free_memory(device: torch.device, utilization: float) -> None:
    """Raise ConfigError where others have taken what ``gpu_memory_utilization`` counts on."""
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
        largest = min(2 * config.max_num_seqs, LARGEST_DEFAULT_CAPTURE)
    largest = min(largest, budget)
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)}
    if budget <= largest:
        sizes.add(budget)
    return tuple(sorted(size for size in sizes if size <= largest))


def warn_of_unused(config: EngineConfig, device: torch.device) -> None:
    """Say which flags the device has no use for."""
    if device.type == "cuda":
        return
    for flag in ("enforce_eager", "cudagraph_capture_sizes", "max_cudagraph_capture_size"):
        if getattr(config, flag):
            logger.warning("--%s has no effect on the CPU: it records no graphs", flag.replace("_", "-"))
