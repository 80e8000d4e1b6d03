"""vLLM, from 0.6 on. Sources: ``vllm/engine/arg_utils.py``, ``vllm/v1/metrics/loggers.py``."""

from __future__ import annotations

from collections.abc import Mapping

from servers.facts import releases_of
from servers.flags.defaults import USUAL, Platform, Spread, version_tuple
from servers.kind import ServerKind

CPU_DEFAULTS = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
"""The API server's on the CPU build, per process of the model's parallel group."""
_CPU_SINCE = (0, 11)
_GPU_SEQS = 256
"""The least that any GPU gets."""


def _defaults(name: str, platform: Platform) -> Spread:
    """Exact where version and device leave no choice."""
    if name == "gpu_memory_utilization":
        return _memory(platform)
    if name in CPU_DEFAULTS:
        return _batch(name, platform)
    return USUAL[name]


def _memory(platform: Platform) -> Spread:
    releases = releases_of("vllm")
    if platform.version and releases:
        flag = releases.flag("gpu_memory_utilization", platform.version)
        if flag is not None and isinstance(flag.default, float):
            return flag.default, flag.default, flag.default
    return USUAL["gpu_memory_utilization"]


def _batch(name: str, platform: Platform) -> Spread:
    usual, low, high = USUAL[name]
    if platform.device == "cpu":
        own = float(CPU_DEFAULTS[name] * platform.processes)
        known = platform.stated and (version_tuple(platform.version) or _CPU_SINCE) >= _CPU_SINCE
        return (own, own, own) if known else (own, min(own, low), max(own, high))
    if platform.device is not None and name == "max_num_seqs":
        return usual, _GPU_SEQS, high
    return usual, low, high


def pool_tokens(labels: Mapping[str, str]) -> float | None:
    """Tokens that the KV pool of ``cache_config_info`` holds: one of its blocks is the null block."""
    blocks, size = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    if not (blocks.isdecimal() and size.isdecimal() and float(blocks) > 0):
        return None
    return (float(blocks) - 1) * float(size)


VLLM = ServerKind(
    name="vllm",
    label="vLLM",
    program="vllm",
    serve=("serve",),
    key_variable="VLLM_API_KEY",
    module="vllm.entrypoints.",
    public=True,
    help=(("--help=all",), ("--help",)),  # before 0.9 there was no page of all flags
    defaults=_defaults,
    metrics={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "queue": ("vllm:num_requests_waiting_by_reason", "vllm:num_requests_waiting"),
        "deferred": ("vllm:num_requests_waiting_by_reason",),
        "waiting_for_kv": ("vllm:num_requests_kv_fetch_by_stage",),
        "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "cache_hit_rate": ("vllm:gpu_prefix_cache_hit_rate",),
        "preemptions": ("vllm:num_preemptions_total",),
        "rejections": ("vllm:admission_rejections_total",),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "generation_tokens": ("vllm:generation_tokens_total",),
        "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "finished": ("vllm:request_success_total",),
        "drafts": ("vllm:spec_decode_num_drafts_total",),
        "draft_tokens": ("vllm:spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens_total",),
        "ttft": ("vllm:time_to_first_token_seconds",),
        "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        "tpot": ("vllm:request_time_per_output_token_seconds",),
        "e2e": ("vllm:e2e_request_latency_seconds",),
        "queue_time": ("vllm:request_queue_time_seconds", "vllm:time_in_queue_requests"),
        "prefill_time": ("vllm:request_prefill_time_seconds",),
        "decode_time": ("vllm:request_decode_time_seconds",),
        "prompt_length": ("vllm:request_prompt_tokens",),
        "generation_length": ("vllm:request_generation_tokens",),
        "prefill_length": ("vllm:request_prefill_kv_computed_tokens",),
        "request_preemptions": ("vllm:request_num_preemptions",),
        "iteration_tokens": ("vllm:iteration_tokens_total",),
        "cache_config": ("vllm:cache_config_info",),
        "adapters": ("vllm:lora_requests_info",),
    },
    families=(
        ("vllm:inter_token_latency_seconds_count", "vLLM V1, 0.10.2 or later"),
        ("vllm:kv_cache_usage_perc", "vLLM V1, 0.9.2 or later"),
        ("vllm:num_requests_swapped", "vLLM V0 (0.6 to 0.9)"),
        ("vllm:cpu_cache_usage_perc", "vLLM V0 (0.6 to 0.9)"),
        ("vllm:gpu_cache_usage_perc", "vLLM V1, 0.8 to 0.9.1"),
        ("vllm:num_requests_running", "vLLM, version unknown"),
    ),
    failures={
        "kv_cache_too_small": r"No available memory for the cache blocks"
        r"|larger than the (maximum number of tokens that can be stored in|available) KV cache",
        "out_of_memory": r"less than desired GPU memory utilization|less than requested memory",
        "bad_flag": r"validation errors? for \w*Config|^Value error, "
        r"|ValueError: .*(max_num|must be|should be)|No common block size|is not supported (for|on|by) ",
        "killed": r"EngineDeadError|(Worker|core) proc \S+ died unexpectedly",
    },
)
