"""The engine's configuration. Field names are vLLM's flag names; defaults are vLLM's unless said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from engine.errors import ConfigError
from engine.lora_config import MAX_LORA_RANK, MAX_LORAS, LoRAModule, check_lora
from engine.speculative_config import SpeculativeConfig

GIB = 1 << 30
MAX_COUNT = (1 << 31) - 1
"""The most tokens, sequences or blocks: kernels count in 32 bits."""
MAX_BYTES = (1 << 63) - 1
LONG_PREFILL_PERCENT = 4
"""With concurrent partial prefills, a prompt is long when more than this share of max_model_len is left."""
UNIFIED_ONLY = (
    "scheduling_policy",
    "long_prefill_token_threshold",
    "max_num_scheduled_tokens",
    "max_num_partial_prefills",
    "max_long_partial_prefills",
    "async_scheduling",
    "kv_offloading_size",
    "speculative_config",
    "enable_lora",
)
"""Flags that ``--scheduler static`` and ``two-track`` do not have."""


SchedulerName = Literal["unified", "static", "two-track"]
SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)
KVCacheDtype = Literal[
    "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"
]


@dataclass(frozen=True)
class StructuredOutputsConfig:
    """``--structured-outputs-config`` (JSON), keys as in vLLM, as far as they are here."""

    backend: Literal["auto", "guidance"] = "auto"
    disable_any_whitespace: bool = False
    """JSON without white space between its parts, for every request. vLLM wants a ``backend`` beside it."""

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> StructuredOutputsConfig:
        """From the flag's JSON text or an already parsed mapping. Raises ConfigError."""
        flag, fix = "structured_outputs_config", 'write {"disable_any_whitespace": true}'
        try:
            given = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise ConfigError(flag, value, f"not JSON ({error})", fix) from None
        if not isinstance(given, Mapping) or not given.keys() <= {"backend", "disable_any_whitespace"}:
            rule = "must be a JSON object with no other keys than backend and disable_any_whitespace"
            raise ConfigError(flag, value, rule, fix)
        config = cls(**given)
        if config.backend not in get_args(get_type_hints(cls)["backend"]):
            raise ConfigError(flag, config.backend, "backend must be auto or guidance", "choose one")
        if not isinstance(config.disable_any_whitespace, bool):
            rule = "disable_any_whitespace must be true or false"
            raise ConfigError(flag, config.disable_any_whitespace, rule, "choose one")
        return config


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine is started with. ``validate`` is called by every entry point but ``explain``.

    Sizes are in tokens, blocks or bytes as named. ``max_model_len=None`` and ``num_gpu_blocks=None``
    are resolved at start-up (from the model, and from the memory plan); see :meth:`resolved`.
    """

    model: str = "bundled"
    tokenizer: str | None = None
    served_model_name: str | tuple[str, ...] | None = None
    """What clients may call the model; the first name is the one in answers and metrics."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    """What keys and values are stored in; "auto": what the model computes in. "fp8" is "fp8_e4m3"; the plain
    fp8 types have no scales (vLLM's scale of 1), those per token and head one for each key and value."""
    quantization: Literal["int8_per_channel"] | None = None
    """Linear layers, the head included, in int8: weights per output channel, quantised as they are loaded,
    and activations per token. vLLM has this only for checkpoints quantised ahead (compressed-tensors); what
    it quantises while loading, such as fp8_per_channel of the same recipe, it names in this way."""
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.92
    device_memory: int | None = None
    """Bytes of the device that the engine may count on; None: all of a GPU, and on the CPU the larger of
    1 GiB and twice the weights."""
    num_gpu_blocks_override: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step beside others; 0: no such cap, or, with
    ``max_num_partial_prefills`` above 1, 4 % of ``max_model_len``."""
    max_num_scheduled_tokens: int | None = None
    """Tokens scheduled in a step, where these are to be fewer than the runner's input has room for."""
    max_num_partial_prefills: int | None = None
    """Requests that a step may leave mid-prefill; None: any number, as every value does in vLLM 0.33."""
    max_long_partial_prefills: int = 1
    """Of ``max_num_partial_prefills``, those that lack more tokens than the threshold."""
    enforce_eager: bool = False
    """Launch every operation of every step: record no CUDA graphs. They are recorded of the layers of decode
    steps (vLLM's cudagraph_mode FULL_DECODE_ONLY). No effect on the CPU, as the next two."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """Batch sizes that decode steps are padded to; None: 1, 2, 4, every 8th, and every 16th from 256 on."""
    max_cudagraph_capture_size: int | None = None
    """The largest of these; None: twice ``max_num_seqs``, 512 at most."""
    kv_offloading_size: float | None = None
    """GiB of host memory for KV blocks that the device's pool evicts; None: no offloading."""
    kv_offloading_backend: Literal["native"] = "native"
    async_scheduling: bool = False
    """Plan a step while the one before it computes. vLLM's default is on where it can: here no core idles."""
    speculative_config: SpeculativeConfig | None = None
    structured_outputs_config: StructuredOutputsConfig | None = None
    enable_lora: bool = False
    """Requests may name a LoRA adapter of ``lora_modules``."""
    max_loras: int = MAX_LORAS
    """The most adapters of a step: a request with one more is set aside."""
    max_lora_rank: int = MAX_LORA_RANK
    lora_modules: tuple[LoRAModule, ...] = ()
    scheduler: SchedulerName = "unified"
    """vLLM V1's scheduler, static batching, or V0's prefill and decode in turn. Not a flag of vLLM."""
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    """Of ``scheduler="two-track"``; as in vLLM V0, which also took "swap" by itself for beam search."""
    swap_space: float = 4
    """GiB of host memory for ``preemption_mode="swap"``, as in vLLM V0."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        names = self.served_model_name or self.model
        return (names,) if isinstance(names, str) else names

    @property
    def lora_names(self) -> tuple[str, ...]:
        """What clients may call the adapters."""
        return tuple(module.name for module in self.lora_modules)

    @property
    def served_name(self) -> str:
        """What the server calls the model."""
        return self.served_names[0]

    @property
    def num_speculative_tokens(self) -> int:
        return self.speculative_config.num_speculative_tokens if self.speculative_config else 0

    @property
    def max_drafting(self) -> int:
        """How many requests may run for drafts to be proposed and verified."""
        limit = self.speculative_config.disable_by_batch_size if self.speculative_config else None
        return MAX_COUNT if limit is None else limit

    @property
    def step_tokens(self) -> int:
        """The token budget of a step."""
        return self.max_num_scheduled_tokens or self.max_num_batched_tokens

    @property
    def prefill_threshold(self) -> int:
        """``long_prefill_token_threshold`` with its default; 0: none. ``max_model_len`` is resolved."""
        if self.long_prefill_token_threshold or (self.max_num_partial_prefills or 1) == 1:
            return self.long_prefill_token_threshold
        assert self.max_model_len is not None
        return max(1, self.max_model_len * LONG_PREFILL_PERCENT // 100)

    @property
    def draft_slots(self) -> int:
        """Rows of the runner's input that a request's drafting takes beside its scheduled tokens."""
        return int(self.speculative_config is not None and self.speculative_config.method == "draft_model")

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots beyond the scheduled tokens that a request's drafting writes to."""
        uses_slots = self.speculative_config is not None and self.speculative_config.uses_model
        return self.num_speculative_tokens if uses_slots else 0

    def resolved(self, max_model_len: int) -> EngineConfig:
        """The config with the model's context length filled in where the user gave none."""
        return self if self.max_model_len is not None else replace(self, max_model_len=max_model_len)

    def validate(self) -> None:
        """Raise ConfigError on the first broken rule; warn where vLLM warns. facts: vLLM's config rules."""
        for flag in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_scheduled_tokens",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "max_num_seqs",
            "max_model_len",
            "num_gpu_blocks_override",
            "max_cudagraph_capture_size",
            "device_memory",
        ):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise ConfigError(flag, value, "must be at least 1", "give a positive number")
            if value is not None and value > (MAX_BYTES if flag == "device_memory" else MAX_COUNT):
                raise ConfigError(flag, value, "is larger than any machine", "give a smaller number")
        if not 0 <= self.seed <= MAX_BYTES:
            raise ConfigError("seed", self.seed, f"must lie in [0, {MAX_BYTES}]", "e.g. 0")
        for name in self.served_names:
            if not _is_unicode(name):
                raise ConfigError(
                    "served_model_name", ascii(name), "is not Unicode text", "give another name"
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
        if self.quantization not in (None, "int8_per_channel"):
            raise ConfigError(
                "quantization", self.quantization, "must be int8_per_channel", "choose it, or drop the flag"
            )
        if self.kv_cache_dtype not in get_args(KVCacheDtype):
            raise ConfigError(
                "kv_cache_dtype",
                self.kv_cache_dtype,
                f"must be one of {', '.join(get_args(KVCacheDtype))}",
                "int8_per_token_head is the most exact of one byte",
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
        self._validate_scheduler()
        self._validate_step_tokens()
        self._validate_partial_prefills()
        self._validate_offloading()
        self._validate_capture_sizes()
        check_lora(self.enable_lora, self.max_loras, self.max_lora_rank, self.lora_modules, self.served_names)
        if length is not None and tokens > seqs * length:
            warnings.warn(
                f"max_num_batched_tokens ({tokens}) exceeds max_num_seqs * max_model_len ({seqs * length}): "
                "the budget can never be used up",
                stacklevel=2,
            )

    def _validate_step_tokens(self) -> None:
        """A step must hold what has to be computed in one step."""
        tokens, inputs = self.step_tokens, self.max_num_batched_tokens
        flag = "max_num_scheduled_tokens" if self.max_num_scheduled_tokens else "max_num_batched_tokens"
        if tokens > inputs:
            rule = f"must not exceed max_num_batched_tokens ({inputs}), the room of the runner's input"
            raise ConfigError(flag, tokens, rule, f"lower it to {inputs} or raise --max-num-batched-tokens")
        length = self.max_model_len
        if length is not None and not self.enable_chunked_prefill and tokens < length:
            raise ConfigError(
                flag,
                tokens,
                f"must be at least max_model_len ({length}) when chunked prefill is off, "
                "or a long prompt fits no step",
                f"raise it to {length}, lower --max-model-len, or drop --no-enable-chunked-prefill",
            )
        drafts, slots = self.num_speculative_tokens, self.draft_slots
        if drafts and 1 + drafts > tokens:
            raise ConfigError(
                flag,
                tokens,
                f"must be at least 1 + num_speculative_tokens ({1 + drafts}), or nothing is ever admitted",
                f"raise it to {1 + drafts} or lower num_speculative_tokens",
            )
        if slots and 1 + drafts + slots > inputs:
            least = 1 + drafts + slots
            raise ConfigError(
                "max_num_batched_tokens",
                inputs,
                f"must be at least 1 + num_speculative_tokens + {slots} for the draft model ({least}), or "
                "nothing is ever admitted",
                f"raise it to {least} or lower num_speculative_tokens",
            )

    def _validate_capture_sizes(self) -> None:
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        flag, shown = "cudagraph_capture_sizes", " ".join(str(size) for size in sizes or ())
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise ConfigError(flag, shown or "(none)", "sizes must be at least 1", "e.g. 1 2 4 8")
        if sizes is not None and min(sizes) > self.max_num_batched_tokens:
            rule = f"every size exceeds max_num_batched_tokens ({self.max_num_batched_tokens})"
            raise ConfigError(flag, shown, rule, "give smaller sizes, or --enforce-eager")
        if sizes and largest is not None and largest != max(sizes):
            rule = f"must be the largest of cudagraph_capture_sizes ({max(sizes)}), where both are given"
            raise ConfigError("max_cudagraph_capture_size", largest, rule, "drop one of the flags")

    def _validate_offloading(self) -> None:
        flag, size = "kv_offloading_size", self.kv_offloading_size
        if self.kv_offloading_backend != "native":
            raise ConfigError(
                "kv_offloading_backend", self.kv_offloading_backend, "must be native", "drop the flag"
            )
        if size is None:
            return
        if not 0 < size < MAX_BYTES / GIB:
            raise ConfigError(flag, size, "must be GiB, more than 0", "e.g. 1")
        if not self.enable_prefix_caching:
            rule = "offloaded blocks are found by the prefix cache, which is off"
            raise ConfigError(flag, size, rule, "drop --no-enable-prefix-caching, or the flag")

    def _validate_partial_prefills(self) -> None:
        flag, most, most_long = (
            "max_num_partial_prefills",
            self.max_num_partial_prefills,
            self.max_long_partial_prefills,
        )
        if (most or 1) > 1 and not self.enable_chunked_prefill:
            rule = "more than 1 needs chunked prefill: without it no prompt is left half-way"
            raise ConfigError(flag, most, rule, "drop --no-enable-chunked-prefill, or the flag")
        if most_long > (most or 1):
            rule = f"must not exceed max_num_partial_prefills ({most or 'not given'})"
            fix = f"lower it, or raise --max-num-partial-prefills to {most_long}"
            raise ConfigError("max_long_partial_prefills", most_long, rule, fix)

    def _validate_scheduler(self) -> None:
        """Refuse what the baseline schedulers do not have."""
        if self.scheduler not in SCHEDULERS:
            rule = f"must be {', '.join(SCHEDULERS[:-1])} or {SCHEDULERS[-1]}"
            raise ConfigError("scheduler", self.scheduler, rule, "choose one")
        if self.preemption_mode not in ("recompute", "swap"):
            raise ConfigError(
                "preemption_mode", self.preemption_mode, "must be recompute or swap", "choose one"
            )
        if not 0 <= self.swap_space < MAX_BYTES / GIB:
            raise ConfigError("swap_space", self.swap_space, "must be GiB, 0 or more", "e.g. 4")
        if self.preemption_mode == "swap" and self.scheduler != "two-track":
            rule = f"the {self.scheduler} scheduler never swaps"
            raise ConfigError("preemption_mode", "swap", rule, "add --scheduler two-track, or drop the flag")
        if self.scheduler == "unified":
            return
        defaults = {field.name: field.default for field in fields(self)}
        for flag in UNIFIED_ONLY:
            if (value := getattr(self, flag)) != defaults[flag]:
                rule = f"the {self.scheduler} scheduler does not have it"
                raise ConfigError(flag, value, rule, "drop the flag, or use --scheduler unified")
        tokens, length = self.max_num_batched_tokens, self.max_model_len
        if length is not None and tokens < length:
            raise ConfigError(
                "max_num_batched_tokens",
                tokens,
                f"must be at least max_model_len ({length}) with --scheduler {self.scheduler}, which never "
                "splits a prompt",
                f"raise it to {length} or lower --max-model-len to {tokens}",
            )


def _is_unicode(text: str) -> bool:
    """False for a word of the command line that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
