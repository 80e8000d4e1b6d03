"""SGLang. Sources: its page "Server Arguments" and ``python/sglang/srt/server_args.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servers.flags.spelling import Spelling
from servers.flags.words import FlagError
from servers.kind import ServerKind
from servers.logs import sglang_log
from servers.logs.log_facts import LogFormat

NAMES: Mapping[str, str] = {
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_loras": "max_loras_per_batch",
    "block_size": "page_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "max_cudagraph_capture_size": "cuda_graph_max_bs_decode",
    "api_server_count": "tokenizer_worker_num",
    "scheduling_policy": "schedule_policy",
    "stream_interval": "stream_interval",
    "cpu_offload_gb": "cpu_offload_gb",
    "seed": "random_seed",
    "tokenizer": "tokenizer_path",
    "tokenizer_mode": "tokenizer_mode",
    "served_model_name": "served_model_name",
    "dtype": "dtype",
    "quantization": "quantization",
    "load_format": "load_format",
    "revision": "revision",
    "download_dir": "download_dir",
    "chat_template": "chat_template",
    "api_key": "api_key",
    "host": "host",
    "port": "port",
    "model": "model_path",
}
"""vLLM's name -> SGLang's, where the value is the same.

``chunked_prefill_size`` bounds the prompt tokens of a step; tokens that decode are not counted in it.
``max_prefill_tokens`` is no bound below the context's length, so it is left alone. ``mem_fraction_static`` is
the share of weights and KV cache alone: activations and graphs must fit into the rest.
"""
ALIASES: Mapping[str, str] = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "model": "model_path",
    "speculative_draft_model": "speculative_draft_model_path",
    "speculative_algo": "speculative_algorithm",
}
"""Other spellings that SGLang takes."""
RENAMED: Mapping[str, str] = {"cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Spellings of older releases: until 0.5.13 the sizes of graphs of both stages went by one name."""
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "enable_prefix_caching": ("disable_radix_cache", False),
    "enforce_eager": ("disable_cuda_graph", True),
    "async_scheduling": ("disable_overlap_schedule", False),
    "disable_custom_all_reduce": ("disable_custom_all_reduce", True),
    "trust_remote_code": ("trust_remote_code", True),
    "skip_tokenizer_init": ("skip_tokenizer_init", True),
}
"""vLLM's switch -> (SGLang's switch, vLLM's value that SGLang's switch stands for)."""
METHODS: Mapping[str, str] = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "draft_model": "STANDALONE",
}
"""A method of ``speculative_config`` -> ``--speculative-algorithm``."""
_DRAFTED = ("speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk")
_PRIORITY = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}


def _written(name: str, value: Any, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    if name == "speculative_config":
        return _speculation(value)
    if name == "scheduling_policy" and value == "priority":
        return _PRIORITY
    if name == "enable_chunked_prefill":
        return {"chunked_prefill_size": -1} if value is False else {}
    if name == "max_num_batched_tokens" and flags.get("enable_chunked_prefill") is False:
        return {}
    return None


def _read(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if speculation := _from_speculation(given):
        found["speculative_config"] = speculation
    if all(given.get(name) == value for name, value in _PRIORITY.items()):
        found["scheduling_policy"] = "priority"
        for name in _PRIORITY:
            del given[name]
    if given.get("chunked_prefill_size") == -1:
        found["enable_chunked_prefill"] = False
        del given["chunked_prefill_size"]
    return found


def _speculation(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A verification step holds the drafts and the token before them, hence one more."""
    if not config:
        return {}
    method = str(config.get("method", "draft_model" if "model" in config else "ngram"))
    if method not in METHODS:
        raise FlagError(
            f"--speculative-config: SGLang has no method {method!r}. It has: {', '.join(METHODS)}."
        )
    known = {"method", "num_speculative_tokens", "model"}
    if others := sorted(set(config) - known):
        raise FlagError(f"--speculative-config: SGLang has nothing like {others[0]!r}. Leave it out.")
    drafts = int(config.get("num_speculative_tokens", 3))
    found: dict[str, Any] = {"speculative_algorithm": METHODS[method]}
    if method != "ngram":
        found |= dict(zip(_DRAFTED, (config.get("model"), drafts, 1), strict=True))
    return {**found, "speculative_num_draft_tokens": drafts + 1}


def _from_speculation(given: dict[str, Any]) -> dict[str, Any] | None:
    """Takes out of ``given`` what a ``speculative_config`` says; None where it says more or nothing."""
    method = {theirs: ours for ours, theirs in METHODS.items()}.get(given.get("speculative_algorithm", ""))
    tokens = given.get("speculative_num_draft_tokens")
    if method is None or not isinstance(tokens, int) or given.get("speculative_eagle_topk", 1) != 1:
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": tokens - 1}
    if model := given.get("speculative_draft_model_path"):
        config["model"] = model
    for name in ("speculative_algorithm", "speculative_num_draft_tokens", *_DRAFTED):
        given.pop(name, None)
    return config


SGLANG = ServerKind(
    name="sglang",
    label="SGLang",
    program="sglang",
    serve=("serve",),
    module="sglang.",
    start="python -m sglang.launch_server",
    positional_model=False,
    always=("--enable-metrics",),
    version_path="/get_server_info",
    spelling=Spelling(
        "SGLang",
        NAMES,
        ALIASES,
        SWITCHES,
        renamed=RENAMED,
        values={"kv_cache_dtype": {"fp8": "fp8_e4m3"}},
        others={
            "enable_chunked_prefill": "chunked_prefill_size",
            "speculative_config": "speculative_algorithm",
        },
        write=_written,
        read=_read,
        drafts=("speculative_num_draft_tokens", 1),
    ),
    memory_step=0.02,
    memory_note="it is the share of weights and KV alone: activations and graphs need the rest, so raise it "
    "in small steps, while the log's available_gpu_mem stays above 5 GB",
    budget_counts_decodes=False,
    drafts_show=False,
    metrics={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "queue": ("sglang:num_queue_reqs",),
        "waiting_for_kv": ("sglang:num_decode_transfer_queue_reqs",),
        "waiting_for_grammar": ("sglang:num_grammar_queue_reqs",),
        "kv_usage": ("sglang:token_usage",),
        "cache_hit_rate": ("sglang:cache_hit_rate",),
        "preemptions": ("sglang:num_retracted_requests_total",),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "generation_tokens": ("sglang:generation_tokens_total",),
        "prefix_queries": ("sglang:prompt_tokens_total",),
        "prefix_hits": ("sglang:cached_tokens_total",),
        "finished": ("sglang:num_requests_total",),
        "accept_length": ("sglang:spec_accept_length",),
        "kv_tokens": ("sglang:max_total_num_tokens",),
        "ttft": ("sglang:time_to_first_token_seconds",),
        "itl": ("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        "e2e": ("sglang:e2e_request_latency_seconds",),
        "queue_time": ("sglang:queue_time_seconds",),
        "prompt_length": ("sglang:prompt_tokens_histogram",),
        "generation_length": ("sglang:generation_tokens_histogram",),
    },
    families=(("sglang:num_running_reqs", "SGLang"), ("sglang:token_usage", "SGLang")),
    log=LogFormat(sglang_log.wrote, sglang_log.parse_log),
)
