"""``--kv-offloading-size``: host memory keeps the KV blocks that the device's pool evicts."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from engine.kv.kv_cache import KVCacheManager
from engine.kv.kv_transfer import KVConnector, KVLoad, KVTransfers
from engine.request import Request


class HostOffload(KVConnector):
    """An LRU of ``num_blocks`` host blocks, found by the hashes of the prefix cache.

    A block is copied out when the pool evicts it, and back, into a block of the request that hits it, while
    others run. Host blocks that are being loaded from are not reused.
    """

    def __init__(self, kv: KVCacheManager, num_blocks: int) -> None:
        self._kv = kv
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first."""
        self._stores: dict[int, int] = {}
        """Host block -> device block, of the plan that is being made."""
        self._new_loads: list[KVLoad] = []
        self._loading: list[KVLoad] = []
        kv.pool.on_evict = self.evicted

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        first = num_computed_tokens // self._kv.block_size
        matched = 0
        for block_hash in self._kv.hashes(request)[first:]:
            if block_hash not in self._held:
                break
            matched += 1
        return matched * self._kv.block_size

    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> KVLoad:
        size = self._kv.block_size
        first = request.num_computed_tokens // size
        hashes = self._kv.hashes(request)[first : first + num_external_tokens // size]
        # Allocating its blocks may have evicted others to the host, in place of some that were to be loaded.
        hashes = list(takewhile(self._held.__contains__, hashes))
        for block_hash in hashes:
            self._held.move_to_end(block_hash)
        blocks = request.block_ids[first : first + len(hashes)]
        pairs = list(zip((self._held[block_hash] for block_hash in hashes), blocks, strict=True))
        load = KVLoad(request, len(hashes) * size, pairs)
        self._new_loads.append(load)
        self._loading.append(load)
        return load

    def evicted(self, block_hash: bytes, block: int) -> None:
        if block_hash in self._held:
            self._held.move_to_end(block_hash)
        elif (host_block := self._take()) is not None:
            self._held[block_hash] = host_block
            self._stores[host_block] = block

    def build_connector_meta(self) -> KVTransfers | None:
        if not self._stores and not self._new_loads:
            return None
        stores = tuple((block, host_block) for host_block, block in self._stores.items())
        transfers = KVTransfers(stores, tuple(self._new_loads))
        self._stores, self._new_loads = {}, []
        return transfers

    def reset(self) -> bool:
        if self._busy():
            return False
        self._free += self._held.values()
        self._held.clear()
        return True

    def check(self) -> None:
        """Assert that every host block is free or held, once."""
        blocks = [*self._free, *self._held.values()]
        assert sorted(blocks) == list(range(len(blocks)))
        assert set(self._stores) <= set(self._held.values())

    def _take(self) -> int | None:
        """A host block to write to: a free one, or the least recently used."""
        if self._free:
            return self._free.pop()
        busy = self._busy()
        for block_hash, host_block in self._held.items():
            if host_block not in busy:
                del self._held[block_hash]
                return host_block
        return None

    def _busy(self) -> set[int]:
        """Host blocks that are, or are about to be, read."""
        self._loading = [load for load in self._loading if not load.ready()]
        return {host_block for load in self._loading for host_block, _ in load.pairs}
