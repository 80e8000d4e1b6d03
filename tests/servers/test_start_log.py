"""What starts tell: lines of real logs of vLLM 0.32 (CPU and GPU), SGLang and the bundled engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from servers.kinds import KINDS
from servers.memory_plan import MemoryPlan
from servers.server_log import parse_log
from servers.start_log import StartLog, read_start_log
from tuner.space.knobs import started_with
from tuner.space.space import Surroundings, build_space, effective

GIB, MIB = 1 << 30, 1 << 20
BUNDLED = """
(EngineCore pid=7) INFO 11-29 [process.py:180] Memory: 1.00 GiB x 0.92 - weights 311 MiB - \
activations 113 MiB \
(at 2,048 batched tokens) = KV 518 MiB
(EngineCore pid=7) INFO 11-29 [process.py:180] KV cache: 23,568 tokens (1,473 blocks of 16), max concurrency \
2.88x for requests of 8,192 tokens
(EngineCore pid=7) INFO 11-29 [process.py:182] CPU KV cache size: 23,568 tokens, Maximum concurrency\
 for 8,192 \
tokens per request: 2.88x
"""
VLLM_CPU = """
(APIServer pid=15046) INFO 11-29 19:50:26 [api_utils.py:347]   version 0.32.0
(APIServer pid=15046) INFO 11-29 19:50:26 [api_utils.py:286] non-default args: {'model_tag': 'M', \
'port': 37727, \
'model': 'M', 'max_model_len': 4096}
(EngineCore pid=15194) INFO 11-29 19:50:33 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='M', speculative_config=None, max_seq_len=4096, tensor_parallel_size=1, kv_cache_dtype=auto, \
device_config=cpu, enable_prefix_caching=True, enable_chunked_prefill=True, \
compilation_config={'compile_sizes': None, 'compile_ranges_endpoints': [2048], 'cudagraph_capture_sizes': []}
"""
PINNED = """
(Worker pid=1) INFO 11-29 19:51:28 [cpu_worker.py:260] Explicitly set (2.0/23.54) GiB for KV cache on node 0.
(EngineCore pid=15194) INFO [kv_cache_utils.py:2327] CPU KV cache size: 93,184 tokens, Maximum \
concurrency for \
4,096 tokens per request: 22.75x
"""
AUTO = """
(Worker pid=1) INFO 11-29 19:51:28 [cpu_worker.py:260] Auto set (10.02/23.54) GiB for KV cache on \
node 0, with \
11.77 GiB requested memory for the worker. 1.75 GiB memory was consumed by non-kv usages.
(EngineCore pid=15194) INFO [kv_cache_utils.py:2327] CPU KV cache size: 466,944 tokens, Maximum concurrency \
"""
VLLM_GPU = """
INFO 01-01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='M', max_seq_len=32768, \
tensor_parallel_size=1, device_config=cuda, enable_prefix_caching=True, enable_chunked_prefill=True, \
compilation_config={'compile_ranges_endpoints': [512, 8192]}
INFO 01-01 [kv_cache_utils.py:1] GPU KV cache size: 381,472 tokens, Maximum concurrency for 32,768 tokens
INFO 01-01 [gpu_worker.py:1034] Free memory on device (78.6/79.2 GiB) on startup. Desired GPU memory\
 utilization \
is (0.92, 72.86 GiB). Actual usage is 15.4 GiB for consumed memory (weights + non-torch), 3.1 GiB for peak \
activation, and 1.9 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-\
cache-memory=1` \
(52.4 GiB) to fit into requested memory, or `--kv-cache-memory=2` (58.0 GiB) to fully utilize gpu memory. \
Current kv cache memory in use is 52.38 GiB.
"""
SGLANG = """
[2025-08-11 17:16:00] server_args=ServerArgs(mem_fraction_static=0.874, chunked_prefill_size=8192)
[2025-08-11 17:17:03] max_total_num_tokens=665690, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=65536, available_gpu_mem=13.50 GB
"""


def started(log: str, server: str, given: Mapping[str, Any], **told: Any) -> StartLog:
    return read_start_log(log, KINDS[server], given, started_with(server), **told)


def plan_of(log: str, utilization: float = 0.92, proportional: bool = False) -> MemoryPlan:
    memory = parse_log(log).memory
    assert memory is not None
    return memory.settled(utilization, proportional)


def test_vllm_on_a_cpu() -> None:
    told = started(VLLM_CPU + PINNED, "vllm", {"max_model_len": 4096})
    assert told.version == "0.32.0"
    assert told.flags["max_num_batched_tokens"] == 2048
    assert told.flags["max_num_seqs"] == 128  # the CPU build's
    assert told.flags["gpu_memory_utilization"] == 0.92
    assert told.flags["enable_prefix_caching"] is True
    assert "max_model_len" not in told.flags
    assert told.memory is not None
    assert (told.memory.pinned, told.memory.kv_tokens) == (True, 93_184)


def test_of_a_server_that_did_not_start_its_build_is_known() -> None:
    assert started("", "vllm", {}, version="0.32.0+cpu").flags["max_num_seqs"] == 128
    assert started("", "vllm", {}, version="0.32.0").flags["max_num_seqs"] == 256


def test_vllm_on_a_large_gpu_has_more_sequences_by_default() -> None:
    told = started(VLLM_GPU, "vllm", {})
    assert (told.flags["max_num_batched_tokens"], told.flags["max_num_seqs"]) == (8192, 1024)
    given = started(VLLM_GPU, "vllm", {"max_num_seqs": 64})
    assert "max_num_seqs" not in given.flags


def test_metrics_tell_what_the_log_does_not() -> None:
    metrics = 'vllm:cache_config_info{block_size="16",gpu_memory_utilization="0.7",engine="0"} 1.0\n'
    assert started("", "vllm", {}, metrics=metrics).flags["gpu_memory_utilization"] == 0.7
    assert started("", "vllm", {}, metrics="up 1\n").flags["gpu_memory_utilization"] == 0.92


def test_sglang() -> None:
    told = started(SGLANG, "sglang", {"max_num_seqs": 64})
    assert told.flags["max_num_batched_tokens"] == 8192
    assert told.flags["gpu_memory_utilization"] == 0.874
    assert "max_num_seqs" not in told.flags
    assert "long_prefill_token_threshold" not in told.flags


@pytest.mark.parametrize(
    ("log", "device", "fixed", "activations", "kv_tokens"),
    [
        (BUNDLED, 1.0, 311 / 1024, 113 / 1024, 23_568),
        (AUTO, 11.77 / 0.5, 1.75, 0.0, 466_944),
        (VLLM_GPU, 79.2, 15.4 + 1.9, 3.1, 381_472),
    ],
)
def test_memory_plans(log: str, device: float, fixed: float, activations: float, kv_tokens: int) -> None:
    plan = plan_of(log, utilization=0.5)
    assert (plan.device, plan.fixed, plan.activations) == pytest.approx(
        (device * GIB, fixed * GIB, activations * GIB)
    )
    assert plan.kv_tokens == kv_tokens
    assert MemoryPlan(**plan.to_json()) == plan


def test_no_plan_without_the_figures() -> None:
    assert parse_log("").memory is None
    assert parse_log("GPU KV cache size: 100 tokens").memory is None
    assert parse_log(VLLM_GPU.replace("KV cache size", "")).memory is None


def test_what_has_no_room_is_refused_with_its_arithmetic() -> None:
    plan = plan_of(BUNDLED)
    baseline = effective({}, "bundled")
    space = build_space(baseline, 8192, around=Surroundings("bundled", memory=plan))
    assert space.refusals(baseline) == []
    assert space.refusals({**baseline, "gpu_memory_utilization": 0.75}) == []
    (refusal,) = space.refusals({**baseline, "gpu_memory_utilization": 0.5})
    assert refusal == (
        "memory: 1.00 GiB x 0.5 - 311 MiB weights - 113 MiB activations = 88 MiB of KV at most, and one "
        "request of max_model_len (8192) needs 180 MiB (8192 x 23,047 bytes)"
    )
    short = {**baseline, "gpu_memory_utilization": 0.5, "max_model_len": 2048}
    assert space.refusals(short) == []
    halved = {**baseline, "gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8"}
    assert space.refusals(halved) == []  # 90 MiB, and the log's figures are rounded
    assert space.refusals({**halved, "gpu_memory_utilization": 0.4}) != []
    assert space.refusals({**baseline, "gpu_memory_utilization": 0.5, "tensor_parallel_size": 2}) == []


def test_activations_that_grow_are_counted_only_where_they_are_known_to() -> None:
    baseline = effective({}, "bundled")
    many = {**baseline, "max_num_batched_tokens": 16_384}
    for proportional in (False, True):
        plan = plan_of(BUNDLED, proportional=proportional)
        assert bool(plan.refusal(many, baseline, 8192)) == proportional


def test_a_pool_of_bytes_holds_what_it_holds() -> None:
    plan = plan_of(PINNED)
    baseline = effective({}, "vllm")
    assert plan.refusal({**baseline, "gpu_memory_utilization": 0.1}, baseline, 8192) == ""
    assert "the KV pool is set by hand" in plan.refusal(baseline, baseline, 100_000)


@pytest.mark.parametrize("line", ['{block_size="16"', "{}", '{block_size="16",block_size="17"} 1', "{ } } 1"])
def test_a_garbled_line_of_metrics_tells_nothing(line: str) -> None:
    told = started(VLLM_CPU, "vllm", {}, metrics=f"vllm:cache_config_info{line}")
    assert told == started(VLLM_CPU, "vllm", {})


def test_the_end_of_an_sglang_start_is_enough() -> None:
    told = started(SGLANG[SGLANG.index("max_total_num_tokens") :], "sglang", {})
    assert (told.flags["max_num_batched_tokens"], told.flags["max_num_seqs"]) == (8192, 4096)
