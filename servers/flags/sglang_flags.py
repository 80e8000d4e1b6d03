"""SGLang's spelling of vLLM's flags: the rest of this package thinks in vLLM's names.

Sources: SGLang's page "Server Arguments" and ``python/sglang/srt/server_args.py``. SGLang's switches have no
``--no-`` form, so a switch is written only where it departs from SGLang's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servers.flags.words import KINDS, FlagError, render

NAMES: Mapping[str, str] = {
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "block_size": "page_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "max_cudagraph_capture_size": "cuda_graph_max_bs",
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
SWITCHES: Mapping[str, tuple[str, bool]] = {
    "enable_prefix_caching": ("disable_radix_cache", False),
    "enforce_eager": ("disable_cuda_graph", True),
    "async_scheduling": ("disable_overlap_schedule", False),
    "disable_custom_all_reduce": ("disable_custom_all_reduce", True),
    "trust_remote_code": ("trust_remote_code", True),
    "skip_tokenizer_init": ("skip_tokenizer_init", True),
}
"""vLLM's switch -> (SGLang's switch, vLLM's value that SGLang's switch stands for)."""
SPELLING: Mapping[str, str] = {
    **NAMES,
    **{ours: theirs for ours, (theirs, _) in SWITCHES.items()},
    "enable_chunked_prefill": "chunked_prefill_size",
    "speculative_config": "speculative_algorithm",
}
"""vLLM's name -> the flag of SGLang's that says it, for every flag that has one."""
METHODS: Mapping[str, str] = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "draft_model": "STANDALONE",
}
"""A method of ``speculative_config`` -> ``--speculative-algorithm``."""
FP8 = {"fp8": "fp8_e4m3"}
"""vLLM's name of a KV format that SGLang spells out."""
_DRAFTED = ("speculative_draft_model_path", "speculative_num_steps", "speculative_eagle_topk")
_PRIORITY = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}


def render_sglang(flags: Mapping[str, Any]) -> list[str]:
    """vLLM's ``flags`` as words for ``sglang.launch_server``. Flags that only SGLang has pass through.

    Raises FlagError for a flag or a value of vLLM's that SGLang has no counterpart for.
    """
    return render({name: value for name, value in to_sglang(flags).items() if value is not False})


def lacks(flag: str) -> bool:
    """Whether ``flag`` is vLLM's and SGLang has nothing like it."""
    return flag in KINDS and flag not in SPELLING and flag != "model"


def to_sglang(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings by SGLang's names. Raises FlagError."""
    found: dict[str, Any] = {}
    for name, value in flags.items():
        if lacks(name):
            raise FlagError(f"--{name.replace('_', '-')}: SGLang has no such flag. Leave it out.")
        if name == "speculative_config":
            found |= _speculation(value)
        elif name == "scheduling_policy" and value == "priority":
            found |= _PRIORITY
        elif name == "enable_chunked_prefill":
            if value is False:
                found["chunked_prefill_size"] = -1
        elif name in SWITCHES:
            switch, stands_for = SWITCHES[name]
            if value == stands_for:
                found[switch] = True
        elif name == "kv_cache_dtype":
            found[name] = FP8.get(value, value)
        elif not (name == "max_num_batched_tokens" and flags.get("enable_chunked_prefill") is False):
            found[NAMES.get(name, name)] = value
    return found


def from_sglang(flags: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's flags by vLLM's names; what vLLM does not have keeps its own."""
    given = {ALIASES.get(name, name): value for name, value in flags.items()}
    back = {theirs: ours for ours, theirs in NAMES.items()}
    switches = {theirs: (ours, value) for ours, (theirs, value) in SWITCHES.items()}
    found: dict[str, Any] = {}
    if speculation := _from_speculation(given):
        found["speculative_config"] = speculation
    if all(given.get(name) == value for name, value in _PRIORITY.items()):
        found["scheduling_policy"] = "priority"
        given = {name: value for name, value in given.items() if name not in _PRIORITY}
    for name, value in given.items():
        if name == "chunked_prefill_size" and value == -1:
            found["enable_chunked_prefill"] = False
        elif name in switches and value is True:
            ours, stands_for = switches[name]
            found[ours] = stands_for
        else:
            found[back.get(name, name)] = value
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
