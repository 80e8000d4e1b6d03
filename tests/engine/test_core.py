"""EngineCore with a runner that computes nothing: the loop, the memory plan, aborts."""

from __future__ import annotations

from typing import Any

import pytest
from serving_kit import HashRunner, hash_token

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.request import Request, RequestStatus, SamplingParams

CONFIG = EngineConfig(
    device_memory=1 << 20, num_gpu_blocks_override=40, max_num_batched_tokens=64, max_num_seqs=8
)


def make_request(name: str, length: int, max_tokens: int, **sampling: Any) -> Request:
    return Request(name, list(range(1, length + 1)), SamplingParams(max_tokens=max_tokens, **sampling))


def run(core: EngineCore) -> dict[str, list[int]]:
    """Steps until nothing is left; the tokens of each request."""
    tokens: dict[str, list[int]] = {}
    while core.has_unfinished:
        _, output = core.step()
        core.scheduler.check()
        for item in output.outputs:
            tokens.setdefault(item.request_id, []).extend(item.token_ids)
    return tokens


def expected(length: int, count: int, vocab_size: int = 1000) -> list[int]:
    ids = list(range(1, length + 1))
    for _ in range(count):
        ids.append(hash_token(ids, vocab_size))
    return ids[length:]


def test_tokens_do_not_depend_on_what_else_runs() -> None:
    core = EngineCore(CONFIG, HashRunner())
    sizes = {"a": (100, 5), "b": (3, 20), "c": (70, 1)}
    for name, (length, count) in sizes.items():
        core.add(make_request(name, length, count))
    assert run(core) == {name: expected(length, count) for name, (length, count) in sizes.items()}
    assert core.scheduler.kv_usage == 0


def test_max_model_len_comes_from_the_runner_and_the_plan_from_its_sizes() -> None:
    core = EngineCore(EngineConfig(device_memory=4 << 20, gpu_memory_utilization=1.0), HashRunner())
    assert core.config.max_model_len == HashRunner.max_model_len
    # 4 MiB - 1 MiB of weights - 1 MiB of activations, in blocks of 16 x 1 KiB.
    assert core.memory_plan.num_blocks == 128
    assert core.memory_plan.num_tokens == 127 * 16


def test_a_pool_too_small_for_one_request_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--device-memory 2621440: one request of max_model_len"):
        EngineCore(EngineConfig(device_memory=5 << 19), HashRunner())


def test_abort_frees_blocks_and_forgets_the_request() -> None:
    core = EngineCore(CONFIG, HashRunner())
    core.add(make_request("gone", 100, 50))
    core.add(make_request("stays", 10, 4))
    core.step()
    assert core.scheduler.kv_usage > 0
    core.abort(["gone", "never seen"])
    assert run(core) == {"stays": expected(10, 4)}
    assert core.stats.finished[0].reason == "length"
    assert core.scheduler.kv_usage == 0


def test_what_a_stop_string_ends_is_counted_as_finished() -> None:
    core = EngineCore(CONFIG, HashRunner())
    core.add(make_request("a", 10, 50))
    for _ in range(3):
        core.step()
    core.abort(["a"], RequestStatus.FINISHED_STOPPED)
    (finished,) = core.stats.finished
    assert (finished.reason, finished.generation_tokens) == ("stop", 3)
    assert core.stats.num_running == 0
