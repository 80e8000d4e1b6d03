"""What a flag is where it is not set, as far as known: each kind of server narrows vLLM's usual range.

vLLM chooses some defaults by the machine (``EngineArgs.get_batch_defaults``): a large GPU gets a larger token
budget, the CPU build fewer sequences. Where the machine is not known, a default is a guess with a range.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from servers.reading import Number

Spread = tuple[float, float, float]
"""The usual value, and the range it has over versions and devices."""

USUAL: dict[str, Spread] = {
    "max_num_batched_tokens": (2048, 2048, 16384),
    "max_num_seqs": (256, 128, 1024),
    "gpu_memory_utilization": (0.92, 0.9, 0.92),
    "long_prefill_token_threshold": (0, 0, 0),
    "num_speculative_tokens": (0, 0, 0),
    "enable_prefix_caching": (1, 1, 1),
    "enable_chunked_prefill": (1, 1, 1),
    "tensor_parallel_size": (1, 1, 1),
    "enforce_eager": (0, 0, 0),
    "num_gpu_blocks_override": (0, 0, 0),
    "kv_cache_memory_bytes": (0, 0, 0),
    "api_server_count": (1, 1, 64),
}
"""vLLM's."""
# What a flag can be at all, where neither a command line nor a log is there to say.
_CONCEIVABLE: dict[str, tuple[float, float]] = {
    "max_num_batched_tokens": (1, math.inf),
    "max_num_seqs": (1, math.inf),
    "gpu_memory_utilization": (0.01, 1),
    "long_prefill_token_threshold": (0, math.inf),
    "num_speculative_tokens": (0, 64),
    "enable_prefix_caching": (0, 1),
    "enable_chunked_prefill": (0, 1),
    "tensor_parallel_size": (1, 64),
    "enforce_eager": (0, 1),
    "num_gpu_blocks_override": (0, math.inf),
    "kv_cache_memory_bytes": (0, math.inf),
    "api_server_count": (1, 64),
}
NAMES = frozenset(USUAL)


@dataclass(frozen=True)
class Platform:
    """What a server runs on. ``device`` as its log names it (cpu, cuda, …); None: not known."""

    version: str | None = None
    device: str | None = None
    stated: bool = True
    """False: no log named the device, the metrics look like it."""
    processes: int = 1
    """Tensor times pipeline parallel."""


def conceivable(name: str, default: Number) -> Number:
    """``default`` as the best guess among all values that the flag can have."""
    low, high = _CONCEIVABLE[name]
    return Number(default.point, low, high, "flag")


def version_tuple(version: str | None) -> tuple[int, int] | None:
    """Major and minor of "0.32.0+cpu"; None where there are none."""
    match = re.match(r"v?(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
