"""The engine's configuration. Field names are vLLM's flag names; defaults are vLLM's unless said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

GIB = 1 << 30
MAX_COUNT = (1 << 31) - 1
"""Of tokens, sequences or blocks: kernels count in 32 bits."""
MAX_BYTES = (1 << 63) - 1


class ConfigError(ValueError):
    """A flag's value breaks a rule. The message names flag, value, rule and fix."""

    def __init__(self, flag: str, value: object, rule: str, fix: str) -> None:
        self.flag, self.value, self.rule, self.fix = flag, value, rule, fix
        super().__init__(f"--{flag.replace('_', '-')} {value}: {rule}. Fix: {fix}.")


@dataclass(frozen=True)
class SpeculativeConfig:
    """``--speculative-config`` (JSON), keys as in vLLM."""

    method: Literal["ngram"] = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        flag = "speculative_config"
        if self.method != "ngram":
            raise ConfigError(flag, self.method, "method must be ngram", "use method=ngram")
        if self.num_speculative_tokens < 1:
            raise ConfigError(
                flag, self.num_speculative_tokens, "num_speculative_tokens must be >= 1", "drop the flag"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                flag,
                f"prompt_lookup_min={self.prompt_lookup_min}, prompt_lookup_max={self.prompt_lookup_max}",
                "1 <= prompt_lookup_min <= prompt_lookup_max must hold",
                "raise prompt_lookup_max or lower prompt_lookup_min",
            )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> SpeculativeConfig:
        """From the flag's JSON text or an already parsed mapping. Raises ConfigError."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    "speculative_config", value, f"not JSON ({error})", 'write e.g. \'{"method": "ngram"}\''
                ) from None
        if not isinstance(value, Mapping):
            raise ConfigError("speculative_config", value, "must be a JSON object", "write {…}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(value) - known)
        if unknown:
            raise ConfigError(
                "speculative_config", unknown[0], "unknown key", f"known keys: {', '.join(sorted(known))}"
            )
        for key, item in value.items():
            if key != "method" and (isinstance(item, bool) or not isinstance(item, int)):
                raise ConfigError("speculative_config", item, f"{key} must be an integer", "write a number")
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is started with. ``validate`` is called by every entry point but ``explain``.

    Sizes are in tokens, blocks or bytes as named. ``max_model_len=None`` and ``num_gpu_blocks=None``
    are resolved at start-up (from the model, and from the memory plan); see :meth:`resolved`.
    """

    model: str = "bundled"
    tokenizer: str | None = None
    served_model_name: str | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    device_memory: int | None = None
    """Bytes the CPU engine treats as its device; None: the larger of 1 GiB and twice the weights."""
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    speculative_config: SpeculativeConfig | None = None

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    def resolved(self, max_model_len: int) -> EngineConfig:
        """The config with the model's context length filled in where the user gave none."""
        return self if self.max_model_len is not None else replace(self, max_model_len=max_model_len)

    def validate(self) -> None:
        """Raise ConfigError on the first broken rule; warn where vLLM warns. facts: vLLM's config rules."""
        for flag in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "num_gpu_blocks_override",
            "device_memory",
        ):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ConfigError(flag, value, "must be at least 1", "give a positive number")
            if value is not None and value > (MAX_BYTES if flag == "device_memory" else MAX_COUNT):
                raise ConfigError(flag, value, "is larger than any machine", "give a smaller number")
        if not 0 <= self.seed <= MAX_BYTES:
            raise ConfigError("seed", self.seed, f"must lie in [0, {MAX_BYTES}]", "e.g. 0")
        if not _is_unicode(self.served_name):
            raise ConfigError(
                "served_model_name", ascii(self.served_name), "is not Unicode text", "give another name"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "gpu_memory_utilization", self.gpu_memory_utilization, "must lie in (0, 1]", "e.g. 0.92"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "long_prefill_token_threshold",
                self.long_prefill_token_threshold,
                "must not be negative",
                "0 turns it off",
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ConfigError(
                "scheduling_policy", self.scheduling_policy, "must be fcfs or priority", "choose one"
            )
        tokens, seqs, length = self.max_num_batched_tokens, self.max_num_seqs, self.max_model_len
        if tokens < seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                tokens,
                f"must be at least max_num_seqs ({seqs}), or a step cannot serve every sequence",
                f"raise it to {seqs} or lower --max-num-seqs to {tokens}",
            )
        if length is not None and not self.enable_chunked_prefill and tokens < length:
            raise ConfigError(
                "max_num_batched_tokens",
                tokens,
                f"must be at least max_model_len ({length}) when chunked prefill is off, "
                "or a long prompt fits no step",
                f"raise it to {length}, lower --max-model-len, or drop --no-enable-chunked-prefill",
            )
        drafts = self.num_speculative_tokens
        if drafts and 1 + drafts > tokens:
            raise ConfigError(
                "max_num_batched_tokens",
                tokens,
                f"must be at least 1 + num_speculative_tokens ({1 + drafts}), or nothing is ever admitted",
                f"raise it to {1 + drafts} or lower num_speculative_tokens",
            )
        if length is not None and tokens > seqs * length:
            warnings.warn(
                f"max_num_batched_tokens ({tokens}) exceeds max_num_seqs * max_model_len ({seqs * length}): "
                "the budget can never be used up",
                stacklevel=2,
            )


def _is_unicode(text: str) -> bool:
    """False for a word of the command line that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
