"""What a flag is when nobody sets it: by engine, version and device, as far as these are known.

vLLM chooses some defaults by the machine (``EngineArgs.get_batch_defaults``): a large GPU gets a larger token
budget, the CPU build fewer sequences. Where the machine is not known, a default is a guess with a range.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from servers.reading import Number

Engine = Literal["vllm", "vtune", "sglang"]

# The usual value, and the range it has over versions and devices.
_DEFAULTS: dict[str, tuple[float, float, float]] = {
    "max_num_batched_tokens": (2048, 2048, 16384),
    "max_num_seqs": (256, 128, 1024),
    "gpu_memory_utilization": (0.92, 0.9, 0.92),
    "long_prefill_token_threshold": (0, 0, 0),
    "num_speculative_tokens": (0, 0, 0),
    "enable_prefix_caching": (1, 1, 1),
    "enable_chunked_prefill": (1, 1, 1),
    "tensor_parallel_size": (1, 1, 1),
    "num_gpu_blocks_override": (0, 0, 0),
    "kv_cache_memory_bytes": (0, 0, 0),
}
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
    "num_gpu_blocks_override": (0, math.inf),
    "kv_cache_memory_bytes": (0, math.inf),
}
NAMES = frozenset(_DEFAULTS)

_CPU_TOKENS, _CPU_SEQS = 2048, 128
"""The API server's on the CPU build, a process of the model's parallel group."""
_CPU_SINCE = (0, 11)
_GPU_SEQS = 256
"""The least that any GPU gets."""


_MEMORY_UNTIL, _MEMORY_SINCE = (0, 18), (0, 20)
"""vLLM went from 0.9 to 0.92 between these (pull request 38284)."""


@dataclass(frozen=True)
class Platform:
    """What a server runs on. ``device`` as its log names it (cpu, cuda, …); None: not known."""

    engine: Engine = "vllm"
    version: str | None = None
    device: str | None = None
    stated: bool = True
    """False: nobody named the device, the metrics look like it."""
    processes: int = 1
    """Tensor times pipeline parallel."""

    def default(self, name: str) -> Number:
        """A flag's default: exact where this platform leaves no choice, else a guess with its range."""
        usual, low, high = _DEFAULTS[name]
        if name in ("max_num_batched_tokens", "max_num_seqs"):
            usual, low, high = self._batch(name, (usual, low, high))
        if name == "gpu_memory_utilization":
            usual, low, high = self._memory((usual, low, high))
        return Number(usual, low, high, "flag")

    def _memory(self, spread: tuple[float, float, float]) -> tuple[float, float, float]:
        usual, old, new = spread
        version = version_tuple(self.version)
        if self.engine == "vtune" or (self.engine == "vllm" and version and version >= _MEMORY_SINCE):
            return new, new, new
        if self.engine == "vllm" and version and version <= _MEMORY_UNTIL:
            return old, old, old
        return usual, old, new

    def _batch(self, name: str, spread: tuple[float, float, float]) -> tuple[float, float, float]:
        cpu = float(_CPU_TOKENS if name == "max_num_batched_tokens" else _CPU_SEQS)
        if self.engine == "vtune":  # the bundled engine's are those of one CPU process
            return cpu, cpu, cpu
        if self.device == "cpu":
            own = cpu * self.processes
            known = self.stated and (version_tuple(self.version) or _CPU_SINCE) >= _CPU_SINCE
            return (own, own, own) if known else (own, min(own, spread[1]), max(own, spread[2]))
        if self.device is not None and name == "max_num_seqs":
            return spread[0], _GPU_SEQS, spread[2]
        return spread


def conceivable(name: str, default: Number) -> Number:
    """``default`` as the best guess among all values that the flag can have."""
    low, high = _CONCEIVABLE[name]
    return Number(default.point, low, high, "flag")


def version_tuple(version: str | None) -> tuple[int, int] | None:
    """Major and minor of "0.32.0+cpu"; None where there are none."""
    match = re.match(r"v?(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
