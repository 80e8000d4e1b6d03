"""The memory plan of a server, from the log of its start, so that a config without room needs no launch.

A plan is the least that a config takes: what a start does not tell (how activations grow with the token
budget) is left out, so that a config is refused only when it cannot fit, never because it may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

GIB, MIB = 1 << 30, 1 << 20

SHAPING = frozenset(
    [
        "tensor_parallel_size",
        "quantization",
        "dtype",
        "device_memory",
        "enforce_eager",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    ]
)
"""Flags that change what weights or the device come to: a config that varies them is not judged."""
KV_BYTES: Mapping[str, int] = {
    "auto": 2,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "int8": 1,
    "int4": 1,
    "fp4": 1,
}
"""Of one element, by the beginning of ``kv_cache_dtype``; below a byte they are taken for one."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of the baseline's server goes. Bytes, tokens."""

    device: float
    """What ``gpu_memory_utilization`` is a share of; the share itself where the log does not say the flag."""
    utilization: float
    """0: the log does not say."""
    fixed: float
    """Weights, and whatever else does not depend on the flags that are varied."""
    activations: float
    """Peak of a step of the baseline's ``max_num_batched_tokens``."""
    kv_bytes: float
    kv_tokens: int
    rounding: float
    """How far the log's figures may be off, together."""
    proportional: bool = False
    """Activations are known to grow as the token budget does. Else only that they do not shrink."""
    pinned: bool = False
    """The pool was set in bytes: ``gpu_memory_utilization`` moves nothing."""

    def settled(self, utilization: float, proportional: bool) -> Self:
        """The same, of a server with this flag. ``proportional``: its activations grow as the budget does."""
        return replace(
            self,
            device=self.device if self.utilization else self.device / utilization,
            utilization=self.utilization or utilization,
            proportional=self.proportional and proportional,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def refusal(self, config: Mapping[str, Any], baseline: Mapping[str, Any], max_model_len: int) -> str:
        """Why one request of ``max_model_len`` tokens cannot fit, with the arithmetic; "" where it may."""
        if any(config.get(flag) != baseline.get(flag) for flag in SHAPING):
            return ""
        pool = self._pool(config, baseline)
        bytes_per_token = self.kv_bytes / self.kv_tokens * _kv_ratio(config, baseline)
        needed = max_model_len * bytes_per_token
        if pool + self.rounding >= needed:
            return ""
        return (
            f"{self._arithmetic(config, baseline)} = {_mib(pool)} MiB of KV at most, and one request of "
            f"max_model_len ({max_model_len}) needs {_mib(needed)} MiB "
            f"({max_model_len} x {bytes_per_token:,.0f} bytes)"
        )

    def tokens_more(self, config: Mapping[str, Any], baseline: Mapping[str, Any]) -> int:
        """By how many tokens of the baseline's ``kv_cache_dtype`` a config's pool is about larger."""
        bytes_more = self._pool(config, baseline) - self._pool(baseline, baseline)
        return int(bytes_more / self.kv_bytes * self.kv_tokens)

    def _pool(self, config: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
        if self.pinned:
            return self.kv_bytes
        return (
            self.device * config["gpu_memory_utilization"] - self.fixed - self._activations(config, baseline)
        )

    def _activations(self, config: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
        """At least so much: they have parts that grow with tokens, with sequences, and with neither."""
        tokens = config["max_num_batched_tokens"] / baseline["max_num_batched_tokens"]
        if self.proportional:
            return self.activations * tokens
        return self.activations * min(1.0, tokens, config["max_num_seqs"] / baseline["max_num_seqs"])

    def _arithmetic(self, config: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
        if self.pinned:
            return "memory: the KV pool is set by hand"
        return (
            f"memory: {self.device / GIB:.2f} GiB x {config['gpu_memory_utilization']:g} "
            f"- {_mib(self.fixed)} MiB weights - {_mib(self._activations(config, baseline))} MiB activations"
        )


def _kv_ratio(config: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    ours, theirs = (_kv_bytes(str(c.get("kv_cache_dtype") or "auto")) for c in (config, baseline))
    return ours / theirs


def _kv_bytes(dtype: str) -> int:
    return next((size for name, size in KV_BYTES.items() if dtype.startswith(name)), 1)


def _mib(size: float) -> str:
    return f"{size / MIB:,.0f}"
