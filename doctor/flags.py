"""The server's current flags, each with where it is known from, and how a flag is written for each engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from doctor.logfile import LogFacts
from doctor.reading import Missing, Number, Reading

Origin = Literal["given", "log", "metrics", "inferred", "default", "guessed"]
Engine = Literal["vllm", "vtune", "sglang"]

# vLLM's default: the usual value, and the range it has over versions and devices (None: one value only).
_DEFAULTS: dict[str, tuple[float, tuple[float, float] | None]] = {
    "max_num_batched_tokens": (2048, (2048, 16384)),
    "max_num_seqs": (256, (128, 1024)),
    "gpu_memory_utilization": (0.9, (0.9, 0.92)),
    "long_prefill_token_threshold": (0, None),
    "num_speculative_tokens": (0, None),
    "enable_prefix_caching": (1, None),
    "enable_chunked_prefill": (1, None),
    "tensor_parallel_size": (1, None),
    "num_gpu_blocks_override": (0, None),
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
}
# Known only from metrics, a log or the command line: there is no default to guess.
_OBSERVED = ("max_model_len", "block_size", "num_gpu_blocks", "kv_cache_tokens")
SWITCHES = frozenset({"enable_prefix_caching", "enable_chunked_prefill"})
FLAG_NAMES = frozenset([*_DEFAULTS, *_OBSERVED])
"""The flags that rules may name. Switches are 0 or 1; num_gpu_blocks_override is 0 where it is not set."""

_SINCE: dict[str, tuple[int, int]] = {
    "long_prefill_token_threshold": (0, 8),
    "speculative_config": (0, 8),
    "num_gpu_blocks_override": (0, 2),
}
_BUNDLED = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_seqs",
        "gpu_memory_utilization",
        "long_prefill_token_threshold",
        "block_size",
        "speculative_config",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "num_gpu_blocks_override",
        "max_model_len",
    }
)
_SGLANG = {
    "max_num_batched_tokens": "chunked_prefill_size",
    "max_num_seqs": "max_running_requests",
    "gpu_memory_utilization": "mem_fraction_static",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tp_size",
}


@dataclass(frozen=True)
class Flag:
    """One flag's value. ``number`` is what rules compute with, a range where the value is not certain."""

    name: str
    value: Any
    origin: Origin
    number: Number

    @property
    def certain(self) -> bool:
        """Whether somebody said so, or it can be nothing else."""
        return self.origin in ("given", "log", "metrics") or (self.origin == "default" and self.number.exact)


@dataclass(frozen=True)
class Flags:
    """All flags of one engine."""

    known: Mapping[str, Flag]
    engine: Engine = "vllm"
    version: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)
    """As the user or the log gave them, with those that no rule names."""

    def reading(self, name: str) -> Reading:
        if name in self.known:
            return self.known[name].number
        return Missing(name, "flag", "not known; pass --flags 'vllm serve …' or --log FILE")

    def value(self, name: str) -> Any:
        """The current value as it would be typed; None where it is not set or not known."""
        return self.known[name].value if name in self.known else self.raw.get(name)

    def with_flag(self, flag: Flag) -> Flags:
        return replace(self, known={**self.known, flag.name: flag})

    def unavailable(self, name: str) -> str | None:
        """Why the running server cannot take this flag, or None."""
        name = "speculative_config" if name == "num_speculative_tokens" else name
        if self.engine == "vtune" and name not in _BUNDLED:
            return "the bundled engine has no such flag"
        if self.engine == "sglang" and name not in _SGLANG:
            return "SGLang has no such flag"
        since, version = _SINCE.get(name), _version_tuple(self.version)
        if since and version and version < since:
            return f"vLLM {self.version} has no such flag (since {since[0]}.{since[1]})"
        return None

    def spelled(self, name: str) -> str:
        """The engine's own name of a flag, in snake case."""
        return _SGLANG.get(name, name) if self.engine == "sglang" else name


def resolve(
    given: Mapping[str, Any] | None,
    log: LogFacts | None,
    cache_config: Mapping[str, str] | None,
    *,
    engine: Engine,
    version: str | None,
) -> Flags:
    """Gather the flags of one engine; what the user says beats the log, which beats the metrics."""
    complete = given is not None or (log is not None and log.complete)
    known = {name: _fallback(name, complete) for name in _DEFAULTS}
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("metrics", _from_metrics(cache_config or {})),
        ("log", _from_log(log) if log else {}),
        ("given", given or {}),
    )
    for origin, values in layers:
        for name, value in _numbers(values).items():
            known[name] = Flag(name, value, origin, Number.exactly(value))
    raw = {**(log.flags if log else {}), **(given or {})}
    return Flags(known, engine, version or (log.version if log else None), raw)


def inferred(name: str, value: float, low: float, high: float) -> Flag:
    """A flag that the metrics give away, although none of them holds it."""
    return Flag(name, value, "inferred", Number(value, low, high, "flag"))


def _fallback(name: str, complete: bool) -> Flag:
    usual, spread = _DEFAULTS[name]
    if complete:
        low, high = spread or (usual, usual)
        return Flag(name, usual, "default", Number(usual, low, high, "flag"))
    return Flag(name, usual, "guessed", Number(usual, *_CONCEIVABLE[name], "flag"))


def _from_log(log: LogFacts) -> dict[str, Any]:
    pool = {"kv_cache_tokens": log.kv_cache_tokens} if log.kv_cache_tokens else {}
    return {**log.flags, **pool}


def _from_metrics(labels: Mapping[str, str]) -> dict[str, Any]:
    """What ``cache_config_info`` holds. Of num_gpu_blocks one is the null block."""
    values: dict[str, Any] = {
        name: labels[name]
        for name in ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching")
        if name in labels
    }
    values["num_gpu_blocks_override"] = labels.get("num_gpu_blocks_override")
    tokens = _number(labels.get("kv_cache_size_tokens"))
    concurrency = _number(labels.get("kv_cache_max_concurrency"))
    if tokens and concurrency:
        values["max_model_len"] = round(tokens / concurrency)
    blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
    if blocks and size:
        values["kv_cache_tokens"] = (blocks - 1) * size
    return values


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name in FLAG_NAMES:
        number = _number(values.get(name))
        if number is not None:
            numbers[name] = number
    speculation = values.get("speculative_config")
    if isinstance(speculation, Mapping):
        numbers["num_speculative_tokens"] = _number(speculation.get("num_speculative_tokens")) or 1.0
    return numbers


def _number(value: Any) -> float | None:
    if value is None or value in ("None", "auto"):
        return None
    if value in ("True", "False"):
        return float(value == "True")
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _version_tuple(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"v?(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None
