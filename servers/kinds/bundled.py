"""The bundled engine: it takes vLLM's flags, as far as it has them, and exposes vLLM's metrics."""

from __future__ import annotations

from servers.flags.defaults import USUAL, Platform, Spread
from servers.kind import ServerKind
from servers.kinds.vllm import CPU_DEFAULTS

_DEFAULTS = {**CPU_DEFAULTS, "gpu_memory_utilization": 0.92}
"""Those of one process on a CPU."""


def _defaults(name: str, platform: Platform) -> Spread:
    own = _DEFAULTS.get(name)
    return USUAL[name] if own is None else (own, own, own)


UNKNOWN_TO_VLLM = frozenset(
    [
        "device_memory",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "scheduler",
        "preemption_mode",
        "swap_space",
    ]
)
"""Of its flags those that vLLM 0.32 does not have; some of them older versions had."""


BUNDLED = ServerKind(
    name="bundled",
    label="the bundled engine",
    program="vtune",
    serve=("serve",),
    key_variable="VLLM_API_KEY",
    exclusive=False,
    help_cached=False,
    flags=frozenset(
        [
            "model",
            "tokenizer",
            "served_model_name",
            "dtype",
            "load_format",
            "kv_cache_dtype",
            "quantization",
            "seed",
            "max_model_len",
            "block_size",
            "gpu_memory_utilization",
            "device_memory",
            "num_gpu_blocks_override",
            "max_num_batched_tokens",
            "max_num_seqs",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "scheduling_policy",
            "long_prefill_token_threshold",
            "max_num_scheduled_tokens",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "enforce_eager",
            "cudagraph_capture_sizes",
            "max_cudagraph_capture_size",
            "kv_offloading_size",
            "kv_offloading_backend",
            "enable_lora",
            "max_loras",
            "max_lora_rank",
            "lora_modules",
            "async_scheduling",
            "speculative_config",
            "structured_outputs_config",
            "scheduler",
            "preemption_mode",
            "swap_space",
        ]
    ),
    defaults=_defaults,
    failures={
        "kv_cache_too_small": r"needs \d+ KV blocks",
        "bad_flag": r"^error: --[a-z-]+ .*Fix: ",
        "killed": r"engine core exited unexpectedly",
    },
)
