"""Which blocks a request holds, what it shares with others, and how many blocks fit into memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

from engine.config import GIB, EngineConfig
from engine.errors import ConfigError
from engine.kv.blocks import BlockPool
from engine.request import Hasher, Request

MIB = 1 << 20


class KVCacheManager:
    """Block tables of all requests over one :class:`BlockPool`.

    A block is full after ``block_size`` tokens. With prefix caching, full blocks carry a hash of everything
    up to their end, so that equal hashes mean equal prefixes. A request's hasher covers the hashed blocks and
    continues from there.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pack_block = Struct(f"{block_size}q").pack

    def lookup(self, request: Request) -> list[int]:
        """The blocks that already hold the beginning of ``request``, up to the first miss.

        Its last token is always left to compute: a request needs logits to go on. Takes no reference.
        """
        if not self.enable_prefix_caching:
            return []
        hits: list[int] = []
        for block_hash in self._hashes(request, (request.num_tokens - 1) // self.block_size):
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def admit(self, request: Request, hits: Sequence[int], num_tokens: int, lookahead: int = 0) -> bool:
        """Start a block table with the shared ``hits``, and room for ``num_tokens + lookahead`` more.

        Admission also needs room for the whole sequence known so far, or it could be preempted half-way
        through its prefill; only what ``num_tokens`` needs is taken. False: there is no room, and nothing
        has changed, the order of the free list included.
        """
        if not self._start(request, hits, num_tokens + lookahead):
            return False
        return self.extend(request, num_tokens, lookahead)

    def receive(self, request: Request, hits: Sequence[int], num_tokens: int) -> bool:
        """Like :meth:`admit`, for whole blocks that are loaded from elsewhere: they get their hashes only
        when they are there."""
        if not self._start(request, hits, num_tokens):
            return False
        request.block_ids += self.pool.allocate(num_tokens // self.block_size)
        return True

    def resume(self, request: Request, num_tokens: int, lookahead: int = 0) -> bool:
        """Like :meth:`admit`, for a request that holds its first blocks already."""
        whole = max(request.num_computed_tokens + num_tokens + lookahead, request.num_tokens)
        if -(-whole // self.block_size) - len(request.block_ids) > self.pool.num_free:
            return False
        return self.extend(request, num_tokens, lookahead)

    def _start(self, request: Request, hits: Sequence[int], num_slots: int) -> bool:
        computed = len(hits) * self.block_size
        whole = max(computed + num_slots, request.num_tokens)
        missing = -(-whole // self.block_size) - len(hits)
        if missing + self.pool.count_free(hits) > self.pool.num_free:
            return False
        self.pool.touch(hits)  # before any block is popped, or a free hit could be evicted
        request.block_ids = list(hits)
        request.num_hashed_blocks = len(hits)
        request.num_computed_tokens = computed
        return True

    def extend(self, request: Request, num_tokens: int, lookahead: int = 0) -> bool:
        """Room for ``num_tokens + lookahead`` after those computed. False: no room, nothing has changed.

        Blocks that will be full of the request's own tokens (drafts are not its own) are hashed at once,
        before they are computed. A request that hits them runs in the same step at the earliest, and attends
        to them after they are written.
        """
        end = request.num_computed_tokens + num_tokens
        missing = -(-(end + lookahead) // self.block_size) - len(request.block_ids)
        if missing > 0:
            if missing > self.pool.num_free:
                return False
            request.block_ids += self.pool.allocate(missing)
        self.hash_blocks(request, min(end, request.num_tokens))
        return True

    def take_one_each(self, requests: Sequence[Request]) -> None:
        """One more block for each request, in this order. The caller has checked that enough are free."""
        for request, block in zip(requests, self.pool.allocate(len(requests)), strict=True):
            request.block_ids.append(block)

    def hash_blocks(self, request: Request, num_tokens: int) -> None:
        """Give every block that ``num_tokens`` of the request fill its hash."""
        full = num_tokens // self.block_size
        if full <= request.num_hashed_blocks or not self.enable_prefix_caching:
            return
        new = slice(request.num_hashed_blocks, full)
        self.pool.set_hashes(request.block_ids[new], self._hashes(request, full)[new])
        request.num_hashed_blocks = full

    def hash_one_each(self, requests: Sequence[Request]) -> None:
        """:meth:`hash_blocks` for requests whose last token fills the block after those that are hashed."""
        if not self.enable_prefix_caching:
            return
        size, pack = self.block_size, self._pack_block
        blocks: list[int] = []
        new: list[bytes] = []
        for request in requests:
            place, hashes = request.num_hashed_blocks, request.block_hashes
            assert len(hashes) == place
            hasher = request.hasher or self._start_hasher(request)
            hasher.update(pack(*request.token_ids[-size:]))
            hashes.append(hasher.digest())
            blocks.append(request.block_ids[place])
            new.append(hashes[place])
            request.num_hashed_blocks = place + 1
        self.pool.set_hashes(blocks, new)

    def hashes(self, request: Request) -> Sequence[bytes]:
        """The hash of each block that the request's tokens fill."""
        return self._hashes(request, request.num_tokens // self.block_size)

    def forget(self, request: Request, num_tokens: int) -> None:
        """Take the hashes off the blocks beyond the request's first ``num_tokens``: they were hashed in this
        step, which now does not compute them."""
        computed = num_tokens // self.block_size
        self.pool.drop_hashes(request.block_ids[computed : request.num_hashed_blocks])
        request.num_hashed_blocks = min(request.num_hashed_blocks, computed)

    def free(self, request: Request) -> None:
        """Give all blocks back. Their content stays findable until they are reused."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_hashed_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False, and nothing happens, while any request holds a block."""
        return self.pool.reset_hashes()

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that the pool agrees with the block tables of ``requests``, which are all there are."""
        holders: Counter[int] = Counter()
        for request in requests:
            assert len(set(request.block_ids)) == len(request.block_ids)
            assert len(request.block_ids) * self.block_size >= request.num_computed_tokens
            assert self.enable_prefix_caching or not request.num_hashed_blocks
            hashed = request.num_hashed_blocks
            for position, block in enumerate(request.block_ids):
                expected = request.block_hashes[position] if position < hashed else None
                assert self.pool.hash_of(block) == expected, f"block {block}: wrong hash"
            holders.update(request.block_ids)
        self.pool.check(holders)

    def _hashes(self, request: Request, count: int) -> Sequence[bytes]:
        """The hashes of the request's first ``count`` blocks, each computed only once.

        SHA-256 makes a collision (which would hand one request another's content) infeasible, so that
        stored tokens need not be compared.
        """
        hashes, size = request.block_hashes, self.block_size
        if len(hashes) < count:
            hasher, width = request.hasher or self._start_hasher(request), 8 * size
            new = request.token_ids[len(hashes) * size : count * size]
            packed = Struct(f"{len(new)}q").pack(*new)
            for start in range(0, len(packed), width):
                hasher.update(packed[start : start + width])
                hashes.append(hasher.digest())
        return hashes if len(hashes) == count else hashes[:count]

    @staticmethod
    def _start_hasher(request: Request) -> Hasher:
        """What is hashed begins with a hash, always of one length, of all beside tokens that keys depend on:
        the adapter and the salt."""
        name = request.lora_name
        extra = f"{len(name)}:{name}{request.cache_salt}"
        request.hasher = hashlib.sha256(hashlib.sha256(extra.encode()).digest())
        return request.hasher


@dataclass(frozen=True)
class MemoryPlan:
    """Where the device's memory goes. Bytes, blocks and tokens as named."""

    device_bytes: int
    gpu_memory_utilization: float
    weights_bytes: int
    activation_bytes: int
    """Peak of one step at ``max_num_batched_tokens``."""
    kv_bytes: int
    num_blocks: int
    """Null block included: it takes memory and holds no request's tokens."""
    block_size: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens the usable blocks hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once."""
        return (self.num_blocks - 1) / -(-self.max_model_len // self.block_size)

    def describe(self) -> str:
        """The lines for the start-up log."""
        return (
            f"Memory: {self.device_bytes / GIB:.2f} GiB x {self.gpu_memory_utilization:g} "
            f"- weights {self.weights_bytes / MIB:,.0f} MiB "
            f"- activations {self.activation_bytes / MIB:,.0f} MiB "
            f"(at {self.max_num_batched_tokens:,} batched tokens) = KV {self.kv_bytes / MIB:,.0f} MiB\n"
            f"KV cache: {self.num_tokens:,} tokens ({self.num_blocks - 1:,} blocks of {self.block_size}), "
            f"max concurrency {self.max_concurrency:.2f}x for requests of {self.max_model_len:,} tokens"
        )


def plan_memory(
    config: EngineConfig, *, weights_bytes: int, activation_bytes: int, kv_bytes_per_token: int
) -> MemoryPlan:
    """KV = gpu_memory_utilization x device - weights - activations, in whole blocks.

    ``num_gpu_blocks_override`` replaces the result. Raises ConfigError when not even one request of
    ``max_model_len`` tokens (which must be resolved) fits.
    """
    assert config.max_model_len is not None
    device = config.device_memory or max(GIB, 2 * weights_bytes)
    block_bytes = kv_bytes_per_token * config.block_size
    kv_bytes = int(device * config.gpu_memory_utilization) - weights_bytes - activation_bytes
    num_blocks = max(kv_bytes, 0) // block_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
        kv_bytes = num_blocks * block_bytes
    needed = 1 + -(-config.max_model_len // config.block_size)
    if num_blocks < needed:
        raise _does_not_fit(config, device, num_blocks, needed, (needed * block_bytes - kv_bytes) / MIB)
    return MemoryPlan(
        device_bytes=device,
        gpu_memory_utilization=config.gpu_memory_utilization,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        kv_bytes=kv_bytes,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
    )


def _does_not_fit(
    config: EngineConfig, device: int, num_blocks: int, needed: int, short_mib: float
) -> ConfigError:
    """The error for a pool that cannot hold one full-length request, with every way out."""
    fits = max(num_blocks - 1, 0) * config.block_size
    rule = (
        f"one request of max_model_len ({config.max_model_len}) needs {needed} KV blocks, "
        f"the null block included, but there are {num_blocks}"
    )
    shorter = f"lower --max-model-len to {fits}" if fits else "use a smaller model"
    if config.num_gpu_blocks_override is not None:
        return ConfigError("num_gpu_blocks_override", num_blocks, rule, f"raise it to {needed} or {shorter}")
    more = f"{short_mib:,.0f} MiB are missing: raise --gpu-memory-utilization or --device-memory"
    smaller = f"lower --max-num-batched-tokens ({config.max_num_batched_tokens}), or {shorter}"
    if config.device_memory is not None:
        return ConfigError("device_memory", device, rule, f"{more}, {smaller}")
    return ConfigError("gpu_memory_utilization", config.gpu_memory_utilization, rule, f"{more}, {smaller}")
