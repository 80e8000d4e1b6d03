"""What a log of vLLM, of either generation, tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recordings import TRUTH, log_path, needs_recordings

from servers.errors import SourceError
from servers.kinds import LABELS
from servers.server_log import parse_log, read_log

V1_LOG = "\n".join(
    [
        "INFO 11-29 11:44:20 [api_utils.py:347]  version 0.32.0",
        "INFO 11-29 11:44:20 [api_utils.py:286] non-default args: "
        "{'model': 'm', 'max_num_seqs': 2, 'max_model_len': 4096}",
        "INFO 11-29 11:44:20 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=4096.",
        "INFO 11-29 11:44:28 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
        "speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=5), "
        "max_seq_len=4096, tensor_parallel_size=1, kv_cache_dtype=auto, device_config=cpu, "
        "enable_prefix_caching=True",
        "INFO 11-29 11:44:52 [kv_cache_utils.py:2327] GPU KV cache size: 93,184 tokens",
        "INFO 11-29 11:45:46 [loggers.py:335] Engine 000: Avg prompt throughput: 551.9 tokens/s, "
        "Avg generation throughput: 110.2 tokens/s, Running: 11 reqs, Waiting: 3 reqs, "
        "GPU KV cache usage: 1.7%, Prefix cache hit rate: 0.0%",
        "INFO 11-29 11:45:56 [loggers.py:335] Engine 000: Avg prompt throughput: 295.1 tokens/s, "
        "Avg generation throughput: 112.0 tokens/s, Running: 12 reqs, Waiting: 0 reqs, "
        "GPU KV cache usage: 1.8%, Prefix cache hit rate: 0.0%",
    ]
)
V0_LOAD = (
    "metrics.py:351] Avg prompt throughput: 4.8 tokens/s, Avg generation throughput: 6.3 tokens/s, "
    "Running: 5 reqs, Swapped: 0 reqs, Pending: 2 reqs, GPU KV cache usage: 40.5%, CPU KV cache usage: 0.0%."
)
V0_LOG = "\n".join(
    [
        "INFO 09-10 06:01:00 api_server.py:495] vLLM API server version 0.6.0",
        "INFO 09-10 06:01:00 api_server.py:496] args: Namespace(model='m', max_num_seqs=64, "
        "max_num_batched_tokens=None, gpu_memory_utilization=0.85, enable_prefix_caching=False)",
        f"INFO 09-10 06:05:33 {V0_LOAD}",
        f"INFO 09-10 06:05:43 {V0_LOAD}",
    ]
)


def test_a_log_of_the_new_kind() -> None:
    facts = parse_log(V1_LOG)
    assert facts.complete
    assert (facts.version, facts.kv_cache_tokens, facts.device) == ("0.32.0", 93184, "cpu")
    wanted: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4096,
        "max_model_len": 4096,
        "enable_prefix_caching": True,
    }
    assert {name: facts.flags[name] for name in wanted} == wanted
    assert facts.flags["speculative_config"]["num_speculative_tokens"] == 5
    (first, page), (second, _) = facts.scrapes
    assert second - first == 10_000
    assert 'vllm:num_requests_waiting{engine="0"} 3' in page


def test_a_log_of_the_old_kind() -> None:
    facts = parse_log(V0_LOG)
    assert facts.complete
    assert facts.version == "0.6.0"
    assert facts.flags == {
        "model": "m",
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.85,
        "enable_prefix_caching": False,
    }
    assert len(facts.scrapes) == 2


def test_arguments_that_are_no_literal_lose_only_what_is_none() -> None:
    line = "non-default args: {'max_num_seqs': 8, 'speculative_config': <object at 0x7f>, 'seed': 3}"
    assert parse_log(line).flags == {"max_num_seqs": 8, "seed": 3}


@needs_recordings
@pytest.mark.parametrize("name", TRUTH)
def test_real_logs_are_read(name: str) -> None:
    facts = read_log(log_path(name))
    assert facts.complete
    assert facts.version == "0.32.0"
    assert facts.device == "cpu"
    assert facts.kv_cache_tokens
    assert len(facts.scrapes) >= 3


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("nothing of interest\n")
    with pytest.raises(SourceError, match=f"no line of a {LABELS} log"):
        read_log(path)
    with pytest.raises(SourceError, match="cannot be read"):
        read_log(tmp_path / "absent.log")
