"""Where flags are known from, and what one is where it is not set."""

from __future__ import annotations

from typing import Any

import pytest

from servers import known_flags
from servers.kinds import KINDS, VLLM
from servers.logs.log_facts import LogFacts


def origin(name: str, **known: Any) -> tuple[Any, str]:
    arguments: dict[str, Any] = {"given": None, "log": None, "cache_config": None, **known}
    flag = known_flags.resolve(**arguments, kind=VLLM, version=None).known[name]
    return flag.value, flag.origin


def test_the_user_beats_the_log_and_the_log_beats_the_metrics() -> None:
    log = LogFacts({"max_num_seqs": 2, "speculative_config": {"num_speculative_tokens": 5}}, complete=True)
    metrics = {"block_size": "16", "gpu_memory_utilization": "0.8", "enable_prefix_caching": "False"}
    assert origin("max_num_seqs", given={"max_num_seqs": 7}, log=log) == (7, "given")
    assert origin("max_num_seqs", log=log) == (2, "log")
    assert origin("gpu_memory_utilization", log=log, cache_config=metrics) == (0.8, "metrics")
    assert origin("max_num_seqs", given={}) == (256, "guessed")
    assert origin("long_prefill_token_threshold", given={}) == (0, "default")
    assert origin("max_num_seqs") == (256, "guessed")
    assert origin("num_speculative_tokens", log=log) == (5, "log")


def test_what_cache_config_info_gives_away() -> None:
    labels = {
        "block_size": "128",
        "num_gpu_blocks": "33",
        "num_gpu_blocks_override": "None",
        "kv_cache_size_tokens": "93184",
        "kv_cache_max_concurrency": "22.75",
    }
    known = known_flags.resolve(None, None, labels, kind=VLLM, version=None).known
    assert known["kv_cache_tokens"].value == 32 * 128  # one block is the null block
    assert known["max_model_len"].value == 4096
    override = known["num_gpu_blocks_override"]
    assert (override.value, override.origin) == (0, "metrics")


CPU_METRICS = {"block_size": "128", "user_specified_block_size": "False"}


@pytest.mark.parametrize(
    ("engine", "device", "given", "seqs", "tokens"),
    [
        ("vllm", "cpu", {}, (128, "default"), (2048, "default")),
        ("vllm", "cpu", {"tensor_parallel_size": 2}, (256, "default"), (4096, "default")),
        ("vllm", "cpu", {"max_num_batched_tokens": 16}, (16, "default"), (16, "given")),
        ("vllm", "cpu", {"max_num_seqs": 4}, (4, "given"), (2048, "default")),
        ("vllm", "cuda", {}, (256, "guessed"), (2048, "guessed")),
        ("vllm", None, {}, (256, "guessed"), (2048, "guessed")),
        ("vllm", None, {"max_num_batched_tokens": 100}, (100, "guessed"), (100, "given")),
        ("bundled", None, {}, (128, "default"), (2048, "default")),
    ],
)
def test_a_default_is_the_platforms_or_a_guess(
    engine: Any, device: str | None, given: dict[str, Any], seqs: tuple[int, str], tokens: tuple[int, str]
) -> None:
    log = LogFacts(complete=True, version="0.32.0", device=device)
    known = known_flags.resolve(given, log, None, kind=KINDS[engine], version=None).known
    assert (known["max_num_seqs"].value, known["max_num_seqs"].origin) == seqs
    assert (known["max_num_batched_tokens"].value, known["max_num_batched_tokens"].origin) == tokens


def test_metrics_that_look_like_a_cpu_shift_the_guess_and_no_more() -> None:
    known = known_flags.resolve({}, None, CPU_METRICS, kind=VLLM, version="0.32.0").known
    assert (known["max_num_seqs"].value, known["max_num_seqs"].origin) == (128, "guessed")
    assert known["max_num_seqs"].number.high >= 1024
    old = LogFacts(complete=True, version="0.9.1", device="cpu")
    assert (
        known_flags.resolve({}, old, None, kind=VLLM, version=None).known["max_num_seqs"].origin == "guessed"
    )


def test_a_budget_without_chunked_prefill_holds_a_whole_prompt() -> None:
    given = {"enable_chunked_prefill": False, "max_model_len": 8192}
    tokens = known_flags.resolve(given, None, None, kind=VLLM, version=None).known["max_num_batched_tokens"]
    assert (tokens.value, tokens.number.low) == (8192, 8192)
