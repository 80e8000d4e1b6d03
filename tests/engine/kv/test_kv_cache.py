"""Block tables and the memory plan."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import GIB, EngineConfig
from engine.errors import ConfigError
from engine.kv.kv_cache import KVCacheManager, MemoryPlan, plan_memory
from engine.request import Request, SamplingParams

MIB = 1 << 20


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams())


def test_blocks_are_taken_as_they_are_needed() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=True)
    item = request("a", list(range(9)))
    assert kv.admit(item, [], 5)
    assert item.block_ids == [1, 2]
    item.num_computed_tokens = 5
    assert kv.extend(item, 3)
    assert item.block_ids == [1, 2]
    item.num_computed_tokens = 8
    assert kv.extend(item, 1)
    assert item.block_ids == [1, 2, 3]


def test_a_failure_changes_nothing() -> None:
    kv = KVCacheManager(3, block_size=4, enable_prefix_caching=True)
    item = request("a", list(range(12)))
    assert not kv.admit(item, [], 4)  # the chunk fits, the whole does not
    assert (item.block_ids, kv.pool.num_free) == ([], 2)
    other = request("b", list(range(8)))
    assert kv.admit(other, [], 8)
    other.num_computed_tokens = 8
    assert not kv.extend(other, 1)
    assert other.block_ids == [1, 2]


def test_rule_5_full_blocks_are_hashed_before_they_are_computed_drafts_never() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=True)
    item = request("a", list(range(6)))
    kv.admit(item, [], 6)
    assert item.num_hashed_blocks == 1
    item.num_computed_tokens = 5
    kv.extend(item, 1 + 3)  # the second block is full of one token and drafts
    assert item.num_hashed_blocks == 1


def test_rule_5_a_block_hashed_by_a_chunk_of_this_step_can_be_hit_in_it_only_as_far_as_scheduled() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=True)
    first, second = request("a", list(range(12))), request("b", list(range(12)))
    kv.admit(first, [], 5)
    assert kv.lookup(second) == [1]


def test_hashes_are_computed_once_and_survive_a_preemption() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=True)
    item = request("a", list(range(9)))
    kv.admit(item, [], 9)
    hashes = list(item.block_hashes)
    kv.free(item)
    item.num_computed_tokens = 0
    assert kv.lookup(item) == [1, 2]
    assert all(new is old for new, old in zip(item.block_hashes, hashes, strict=True))


def test_hashes_depend_on_everything_before_and_on_the_salt() -> None:
    kv = KVCacheManager(10, block_size=2, enable_prefix_caching=True)
    tokens = [[1, 2, 3, 4, 0], [1, 2, 3, 4, 9], [7, 2, 3, 4, 0]]
    items = [request(str(place), prompt) for place, prompt in enumerate(tokens)]
    salted = request("salted", tokens[0])
    salted.cache_salt = "x"
    for item in [*items, salted]:
        kv.lookup(item)
    one, same, other = (item.block_hashes for item in items)
    assert one == same
    assert one[0] != other[0] != salted.block_hashes[0] != one[0]
    assert one[1] != other[1]


def test_hashes_are_the_same_whether_a_prompt_has_the_tokens_or_they_come_one_by_one() -> None:
    kv = KVCacheManager(20, block_size=4, enable_prefix_caching=True)
    whole, grown = request("whole", list(range(17))), request("grown", list(range(5)))
    kv.lookup(whole)
    kv.admit(grown, [], 5)
    for token in range(5, 16):
        grown.num_computed_tokens = len(grown.token_ids)
        grown.token_ids.append(token)
        kv.extend(grown, 1)
        if token == 11:
            kv.free(grown)  # preempted, and computed anew
            grown.num_computed_tokens = 0
            kv.admit(grown, kv.lookup(grown), 4)
    grown.token_ids += [0]
    assert grown.block_hashes == whole.block_hashes == kv.hashes(whole)
    assert len(whole.block_hashes) == 4


def test_without_caching_nothing_is_hashed() -> None:
    kv = KVCacheManager(10, block_size=4, enable_prefix_caching=False)
    item = request("a", list(range(9)))
    kv.admit(item, [], 9)
    assert (item.num_hashed_blocks, item.block_hashes) == (0, [])
    kv.check([item])


# ------------------------------------------------------------- memory plan

KV_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M in bf16


def plan(weights: int = 269 * MIB, activation: int = 40 * MIB, **flags: Any) -> MemoryPlan:
    config = EngineConfig(**{"max_model_len": 8192, **flags})
    return plan_memory(
        config, weights_bytes=weights, activation_bytes=activation, kv_bytes_per_token=KV_PER_TOKEN
    )


def test_kv_is_what_utilization_leaves_after_weights_and_activations() -> None:
    memory = plan()
    assert memory.device_bytes == GIB
    assert memory.kv_bytes == int(0.92 * GIB) - 309 * MIB
    assert memory.num_blocks == memory.kv_bytes // (16 * KV_PER_TOKEN)
    assert memory.num_tokens == (memory.num_blocks - 1) * 16
    assert memory.max_concurrency == pytest.approx(memory.num_tokens / 8192)


def test_the_device_defaults_to_twice_the_weights_where_that_is_more() -> None:
    assert plan(weights=GIB).device_bytes == 2 * GIB
    assert plan(weights=GIB, device_memory=3 * GIB).device_bytes == 3 * GIB


def test_a_larger_budget_visibly_costs_kv() -> None:
    assert plan(activation=400 * MIB).num_tokens < plan().num_tokens


def test_the_override_wins() -> None:
    memory = plan(num_gpu_blocks_override=514)
    assert (memory.num_blocks, memory.num_tokens, memory.max_concurrency) == (514, 8208, 513 / 512)


def test_the_plan_is_told_in_tokens_and_concurrency() -> None:
    assert plan(num_gpu_blocks_override=1025).describe().splitlines() == [
        "Memory: 1.00 GiB x 0.92 - weights 269 MiB - activations 40 MiB "
        "(at 2,048 batched tokens) = KV 360 MiB",
        "KV cache: 16,384 tokens (1,024 blocks of 16), max concurrency 2.00x for requests of 8,192 tokens",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"num_gpu_blocks_override": 512},
            r"--num-gpu-blocks-override 512: .* Fix: raise it to 513 or lower",
        ),
        ({"gpu_memory_utilization": 0.3}, r"--gpu-memory-utilization 0.3: .*MiB are missing: raise"),
        (
            {"device_memory": 256 * MIB},
            r"--device-memory \d+: one request of max_model_len \(8192\) needs 513",
        ),
        (
            {"gpu_memory_utilization": 0.45},
            r"lower --max-num-batched-tokens \(2048\), or lower --max-model-len to",
        ),
    ],
)
def test_less_than_one_full_request_is_refused_with_a_way_out(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**flags)


def test_the_suggested_context_length_fits() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(gpu_memory_utilization=0.45)
    length = int(caught.value.fix.rsplit(" ", 1)[1])
    assert plan(gpu_memory_utilization=0.45, max_model_len=length).max_concurrency >= 1
