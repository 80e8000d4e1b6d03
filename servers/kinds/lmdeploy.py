"""LMDeploy's ``api_server``, on the TurboMind or the PyTorch engine. Read from the wheel of 0.18.0.

Flags: ``lmdeploy/cli/serve.py`` and ``cli/utils.py``. Metrics and the periodic line: ``metrics/loggers.py``;
they are on unless ``--disable-metrics``, and gauges are renewed every 10 s. What it refuses: ``messages.py``
and ``pytorch/engine/executor/base.py``. Neither metrics nor log say how many tokens the KV pool holds.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator, Mapping
from typing import Any

from servers.flags.defaults import USUAL, Platform, Spread
from servers.flags.spelling import Spelling
from servers.flags.words import FlagError
from servers.kind import ServerKind
from servers.logs.log_facts import LogFacts, LogFormat, page, pairs

NAMES: Mapping[str, str] = {
    "model": "model_path",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_prefill_token_num",
    "gpu_memory_utilization": "cache_max_entry_count",
    "max_model_len": "session_len",
    "block_size": "cache_block_seq_len",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "kv_cache_dtype": "quant_policy",
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "quantization": "model_format",
    "cudagraph_capture_sizes": "cudagraph_capture_batch_sizes",
    "served_model_name": "model_name",
    "api_key": "api_keys",
    "host": "server_name",
    "port": "server_port",
    **{
        same: same
        for same in (
            "dtype",
            "revision",
            "download_dir",
            "chat_template",
            "hf_overrides",
            "generation_config",
            "kv_transfer_config",
            "tool_call_parser",
            "reasoning_parser",
            "distributed_executor_backend",
        )
    },
}
"""vLLM's name -> LMDeploy's.

``max_prefill_token_num`` bounds the prompt tokens of a step; tokens that decode are not counted in it.
``cache_max_entry_count`` is the share of the memory that the weights leave free, and not of the device.
"""
METHODS = frozenset({"eagle", "eagle3", "deepseek_mtp", "hy3_mtp", "qwen3_5_mtp", "dflash"})
KV_FORMATS: Mapping[Any, str] = {
    0: "auto",
    "none": "auto",
    4: "int4",
    8: "int8",
    16: "fp8",
    "fp8_e4m3": "fp8",
    17: "fp8_e5m2",
    42: "turbo_quant",
}
"""Spellings of ``--quant-policy`` -> the format; the others are the format's name."""


def _written(name: str, value: Any, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    if name == "served_model_name" and isinstance(value, list):
        return {"model_name": value[0]}
    if name != "speculative_config":
        return None
    if not value:
        return {}
    method = value.get("method")
    if method not in METHODS:
        known = ", ".join(sorted(METHODS))
        raise FlagError(f"--speculative-config: LMDeploy has no method {method!r}. It has: {known}.")
    drafted = {"speculative_draft_model": value["model"]} if "model" in value else {}
    drafts = value.get("num_speculative_tokens", 1)
    return {"speculative_algorithm": method, **drafted, "speculative_num_draft_tokens": drafts}


def _read(given: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if keys := given.pop("api_keys", None):
        found["api_key"] = keys[0] if isinstance(keys, list) else keys
    if "quant_policy" in given:
        policy = given.pop("quant_policy")
        found["kv_cache_dtype"] = KV_FORMATS.get(policy, policy)
    if method := given.pop("speculative_algorithm", None):
        drafts = given.pop("speculative_num_draft_tokens", 1)
        found["speculative_config"] = {"method": method, "num_speculative_tokens": drafts}
        if model := given.pop("speculative_draft_model", None):
            found["speculative_config"]["model"] = model
    return found


_DEFAULTS: Mapping[str, Spread] = {
    "max_num_batched_tokens": (8192, 8192, 8192),
    "max_num_seqs": (128, 128, 1024),  # 384 on an A100, 1024 on an H100
    "gpu_memory_utilization": (0.8, 0.8, 0.8),
    "enable_prefix_caching": (0, 0, 0),
}


def _defaults(name: str, platform: Platform) -> Spread:
    return _DEFAULTS.get(name, USUAL[name])


_PERIODIC = re.compile(
    r"\[(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) DP(?P<rank>\d+)\] "
    r"Avg thr \(in/out\): (?P<prompt>[\d.]+) / (?P<generation>[\d.]+) tokens/s, .*?"
    r"Engine \(running/waiting\): (?P<running>\d+) / (?P<waiting>\d+), KV cache: (?P<kv>[\d.]+)%(?P<rest>.*)"
)
_CONFIG = re.compile(r"updated backend_config=(?:Pytorch|Turbomind)EngineConfig\((.*)\)")
_LOWERED = re.compile(r"No enough memory\. Update max_prefill_token_num=(\d+)")
_HITS = re.compile(r"Prefix cache hit rate: ([\d.]+)%")
_DRAFTS = re.compile(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens")
_FIELDS = {"block_size": "cache_block_seq_len"}
"""Fields of the PyTorch engine's config whose flag has another name."""


def _wrote(text: str) -> bool:
    return _PERIODIC.search(text) is not None or _CONFIG.search(text) is not None


def _parse(text: str) -> LogFacts:
    """With ``--log-level INFO`` the whole config is there, else only the periodic lines."""
    lines = text.splitlines()
    config: dict[str, Any] = {}
    for line in lines:
        if match := _CONFIG.search(line):
            config = {_FIELDS.get(name, name): value for name, value in pairs(match[1]).items()}
        elif match := _LOWERED.search(line):
            config["max_prefill_token_num"] = int(match[1])
    own = set(NAMES.values()) | {"enable_prefix_caching"}
    flags = {name: value for name, value in config.items() if name in own}
    return LogFacts(flags, complete="session_len" in config, scrapes=tuple(_scrapes(lines)))


def _scrapes(lines: list[str]) -> Iterator[tuple[int, str]]:
    """One per moment; counters are what the lines say of each interval, summed up. A rank that says nothing
    is as it last said."""
    counters: dict[str, dict[str, float]] = {}
    seen: dict[str, int] = {}
    latest: dict[str, str] = {}
    pages: dict[int, str] = {}
    for match in filter(None, map(_PERIODIC.search, lines)):
        at = calendar.timegm((*(int(match[part]) for part in range(1, 7)), 0, 0, 0)) * 1000
        rank = match["rank"]
        seconds = max(0, at - seen.get(rank, at)) / 1000
        seen[rank] = at
        own = counters.setdefault(rank, {"prompt_tokens": 0.0, "generation_tokens": 0.0})
        own["prompt_tokens"] += seconds * float(match["prompt"])
        own["generation_tokens"] += seconds * float(match["generation"])
        if drafts := _DRAFTS.search(match["rest"]):
            for name, tokens in zip(("accepted", "draft"), drafts.groups(), strict=True):
                key = f"spec_decode_num_{name}_tokens"
                own[key] = own.get(key, 0.0) + float(tokens)
        gauges = {
            "num_requests_running": float(match["running"]),
            "num_requests_waiting": float(match["waiting"]),
            "gpu_cache_usage_perc": float(match["kv"]) / 100,
        }
        if hits := _HITS.search(match["rest"]):
            gauges["prefix_cache_hit_rate"] = float(hits[1]) / 100
        samples = gauges | {f"{name}_total": value for name, value in own.items()}
        latest[rank] = page(rank, {f"lmdeploy:{name}": value for name, value in samples.items()})
        pages[at] = "".join(latest.values())
    yield from sorted(pages.items())


LMDEPLOY = ServerKind(
    name="lmdeploy",
    label="LMDeploy",
    program="lmdeploy",
    serve=("serve", "api_server"),
    public=True,
    version_path="",
    spelling=Spelling(
        "LMDeploy",
        NAMES,
        switches={
            "enable_prefix_caching": ("enable_prefix_caching", True),
            "enforce_eager": ("eager_mode", True),
            "enable_eplb": ("enable_eplb", True),
            "trust_remote_code": ("trust_remote_code", True),
        },
        values={"kv_cache_dtype": {"auto": "none"}},
        others={"speculative_config": "speculative_algorithm"},
        many=frozenset(
            {
                "api_keys",
                "adapters",
                "allow_origins",
                "allow_methods",
                "allow_headers",
                "allowed_media_domains",
                "cudagraph_capture_batch_sizes",
            }
        ),
        write=_written,
        read=_read,
        drafts=("speculative_num_draft_tokens", 0),
    ),
    defaults=_defaults,
    memory_step=0.05,
    memory_note="it is the share of the memory that the weights leave free: activations need the rest, so "
    "raise it in small steps",
    budget_counts_decodes=False,
    prompt_lookup=False,
    drafts_show=False,
    metrics={
        "running": ("lmdeploy:num_requests_running",),
        "waiting": ("lmdeploy:num_requests_waiting",),
        "queue": ("lmdeploy:num_requests_waiting",),
        "kv_usage": ("lmdeploy:gpu_cache_usage_perc",),
        "cache_hit_rate": ("lmdeploy:prefix_cache_hit_rate",),
        "prompt_tokens": ("lmdeploy:prompt_tokens_total",),
        "generation_tokens": ("lmdeploy:generation_tokens_total",),
        "prefix_queries": ("lmdeploy:prompt_tokens_total",),
        "prefix_hits": ("lmdeploy:cached_tokens_total",),
        "finished": ("lmdeploy:request_success_total",),
        "drafts": ("lmdeploy:spec_decode_num_drafts_total",),
        "draft_tokens": ("lmdeploy:spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("lmdeploy:spec_decode_num_accepted_tokens_total",),
        "ttft": ("lmdeploy:time_to_first_token_seconds",),
        "itl": ("lmdeploy:iter_token_latency",),
        "e2e": ("lmdeploy:e2e_request_latency_seconds",),
        "queue_time": ("lmdeploy:request_queue_time_seconds",),
        "prefill_time": ("lmdeploy:request_prefill_time_seconds",),
        "decode_time": ("lmdeploy:request_decode_time_seconds",),
        "prompt_length": ("lmdeploy:request_prompt_tokens",),
        "generation_length": ("lmdeploy:request_generation_tokens",),
    },
    families=(("lmdeploy:num_requests_running", "LMDeploy"), ("lmdeploy:gpu_cache_usage_perc", "LMDeploy")),
    log=LogFormat(_wrote, _parse),
    failures={
        "kv_cache_too_small": r"No enough gpu memory for (kv|state) cache",
        "out_of_memory": r"No enough gpu memory for runtime",
        "bad_flag": r"AssertionError: .*(\binvalid |must be )|ValueError: invalid quant_policy"
        r"|object-cache path expects",
    },
)
