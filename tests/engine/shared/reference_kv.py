"""A slow KV cache manager, built otherwise: no hashes, no linked list. Content is compared token by token."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Request

Content = tuple[str, str, tuple[int, ...]]


class ReferencePool:
    """The free list is a Python list; what a block holds is the whole token sequence up to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free_blocks = list(range(1, num_blocks))
        self.contents: list[tuple[int, Content]] = []
        """In the order of insertion: block, content."""
        self.refs: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    @property
    def usage(self) -> float:
        return 1 - len(self.free_blocks) / (self.num_blocks - 1)

    def free_list(self) -> list[int]:
        return list(self.free_blocks)

    def find(self, content: Content) -> int | None:
        return next((block for block, held in self.contents if held == content), None)

    def holds(self, block: int) -> bool:
        return any(other == block for other, _ in self.contents)

    def pop(self) -> int:
        block = self.free_blocks.pop(0)
        self.contents = [entry for entry in self.contents if entry[0] != block]
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        if block in self.free_blocks:
            self.free_blocks.remove(block)
        self.refs[block] = self.refs.get(block, 0) + 1

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            place = len(self.free_blocks) if self.holds(block) else 0
            self.free_blocks.insert(place, block)


class ReferenceKV:
    """The interface of KVCacheManager, as far as the scheduler and its tests use it."""

    def __init__(self, num_blocks: int, block_size: int, caching: bool) -> None:
        self.pool = ReferencePool(num_blocks)
        self.block_size = block_size
        self.caching = caching

    def lookup(self, request: Request) -> list[int]:
        hits: list[int] = []
        end = self.block_size
        while self.caching and end < len(request.token_ids):
            block = self.pool.find(self._content(request, end))
            if block is None:
                break
            hits.append(block)
            end += self.block_size
        return hits

    def admit(self, request: Request, hits: Sequence[int], num_tokens: int, lookahead: int = 0) -> bool:
        ends = [len(hits) * self.block_size + num_tokens + lookahead, len(request.token_ids)]
        unheld = [block for block in hits if block in self.pool.free_blocks]
        for end in ends:
            if self._missing(end, len(hits)) + len(unheld) > self.pool.num_free:
                return False
        for block in hits:
            self.pool.share(block)
        request.block_ids = list(hits)
        request.num_computed_tokens = len(hits) * self.block_size
        assert self.extend(request, num_tokens, lookahead)
        return True

    def extend(self, request: Request, num_tokens: int, lookahead: int = 0) -> bool:
        end = request.num_computed_tokens + num_tokens
        missing = self._missing(end + lookahead, len(request.block_ids))
        if missing > self.pool.num_free:
            return False
        for _ in range(missing):
            request.block_ids.append(self.pool.pop())
        self.hash_blocks(request, min(end, len(request.token_ids)))
        return True

    def hash_blocks(self, request: Request, num_tokens: int) -> None:
        for place, block in enumerate(request.block_ids):
            end = (place + 1) * self.block_size
            if self.caching and end <= num_tokens and not self.pool.holds(block):
                self.pool.contents.append((block, self._content(request, end)))

    def forget(self, request: Request, num_tokens: int) -> None:
        for block in request.block_ids[num_tokens // self.block_size :]:
            self.pool.contents = [entry for entry in self.pool.contents if entry[0] != block]

    def free(self, request: Request) -> None:
        for block in reversed(request.block_ids):
            self.pool.drop(block)
        request.block_ids = []

    def check(self, requests: object) -> None:
        assert len(set(self.pool.free_blocks)) == len(self.pool.free_blocks)

    def _missing(self, num_tokens: int, have: int) -> int:
        blocks = 0
        while blocks * self.block_size < num_tokens:
            blocks += 1
        return max(blocks - have, 0)

    def _content(self, request: Request, end: int) -> Content:
        return request.lora_name, request.cache_salt, tuple(request.token_ids[:end])
