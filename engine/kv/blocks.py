"""The pool of KV blocks: which are free, in which order they are reused, and what they still contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0
"""Never handed out. It is also the sentinel that closes the free list into a ring."""


class PrefixIndex:
    """Block hash -> the blocks that hold that content, in the order they were inserted.

    Two requests that compute the same tokens at the same time end up with two blocks of one hash. Both are
    kept: a lookup returns the first inserted, and the next takes its place when that one is evicted.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._later: dict[bytes, list[int]] = {}

    def get(self, block_hash: bytes) -> int | None:
        return self._first.get(block_hash)

    def insert(self, block_hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        first = self._first
        for block_hash, block in zip(block_hashes, blocks, strict=True):
            if first.setdefault(block_hash, block) != block:
                self._later.setdefault(block_hash, []).append(block)

    def remove(self, blocks: Iterable[int], hashes: list[bytes | None]) -> None:
        """Forget those of ``blocks`` that are inserted, and drop their hashes from ``hashes``, by block."""
        first, later = self._first, self._later
        for block in blocks:
            block_hash = hashes[block]
            if block_hash is None:
                continue
            hashes[block] = None
            if block_hash in later:
                self._remove_duplicate(block_hash, block)
            else:
                del first[block_hash]

    def _remove_duplicate(self, block_hash: bytes, block: int) -> None:
        later = self._later[block_hash]
        if self._first[block_hash] == block:
            self._first[block_hash] = later.pop(0)
        else:
            later.remove(block)
        if not later:
            del self._later[block_hash]

    def clear(self) -> None:
        self._first.clear()
        self._later.clear()

    def items(self) -> Iterable[tuple[bytes, list[int]]]:
        """Every hash with its blocks, first inserted first."""
        return ((key, [block, *self._later.get(key, ())]) for key, block in self._first.items())


class BlockPool:
    """Blocks ``1 .. num_blocks - 1`` with reference counts, an LRU free list, and a prefix index.

    The free list is intrusive and doubly linked (two arrays of block ids), so that a hit block is taken out
    of its middle in O(1). Allocation pops the head. A block freed without a hash goes to the head, since
    its content is useless; one with a hash goes to the tail, so that the longest unused content dies first.
    A free block keeps its hash, and so can be hit, until it is popped.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to hand out: block 0 is the null block")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self._next = [*range(1, num_blocks), NULL_BLOCK]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index = PrefixIndex()
        self.on_evict: Callable[[bytes, int], None] | None = None
        """Called with the hash and the block whose content is lost as it is handed out."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0..1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block to share for this content, or None. Changes nothing: see :meth:`touch`."""
        return self._index.get(block_hash)

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` have no holder: sharing those uses up free blocks."""
        refs = self._refs
        return sum(1 for block in blocks if refs[block] == 0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block, out of the free list where it was free."""
        for block in blocks:
            if self._refs[block] == 0:
                self._unlink(block)
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Pop ``count`` blocks off the head, evicting the content they held. The caller has checked
        that ``count <= num_free``."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        after, refs = self._next, self._refs
        blocks = []
        block = NULL_BLOCK
        for _ in range(count):
            block = after[block]
            refs[block] = 1
            blocks.append(block)
        if self.on_evict is not None:
            for block_hash, evicted in ((self._hashes[block], block) for block in blocks):
                if block_hash is not None:
                    self.on_evict(block_hash, evicted)
        self._index.remove(blocks, self._hashes)
        head = after[block]  # all before it leave the list at once
        after[NULL_BLOCK], self._prev[head] = head, NULL_BLOCK
        self.num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block of a request's table, given in table order.

        The walk is in reverse: the end of a sequence is of use to fewer others than its beginning, so it is
        to be reused first.
        """
        refs, hashes, before, after = self._refs, self._hashes, self._prev, self._next
        useless: list[int] = []
        num_held = 0
        tail = before[NULL_BLOCK]
        for block in reversed(blocks):
            refs[block] = held = refs[block] - 1
            if held:
                num_held += 1
            elif hashes[block] is None:
                useless.append(block)
            else:
                before[block], after[tail] = tail, block
                tail = block
        before[NULL_BLOCK], after[tail] = tail, NULL_BLOCK
        for block in useless:
            head = after[NULL_BLOCK]
            before[block], after[block] = NULL_BLOCK, head
            after[NULL_BLOCK] = before[head] = block
        self.num_free += len(blocks) - num_held

    def set_hashes(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Declare what held, not yet hashed blocks contain, so that lookups find them."""
        self._index.insert(block_hashes, blocks)
        hashes = self._hashes
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert hashes[block] is None
            hashes[block] = block_hash

    def drop_hashes(self, blocks: Iterable[int]) -> None:
        """Forget what blocks were declared to contain."""
        self._index.remove(blocks, self._hashes)

    def reset_hashes(self) -> bool:
        """Forget all content, if every block is free; else change nothing and return False."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._hashes = [None] * self.num_blocks
        self._index.clear()
        return True

    def check(self, holders: dict[int, int]) -> None:
        """Assert that counts, free list and index agree. ``holders``: block -> tables that list it."""
        free = self.free_list()
        assert len(free) == len(set(free)) == self.num_free
        assert NULL_BLOCK not in free
        assert NULL_BLOCK not in holders
        for block in free:
            assert self._next[self._prev[block]] == block == self._prev[self._next[block]]
        unheld = set(free)
        for block in range(1, self.num_blocks):
            assert self._refs[block] == holders.get(block, 0), f"block {block}: wrong reference count"
            assert (self._refs[block] == 0) == (block in unheld), f"block {block}: free list disagrees"
        indexed = {block: key for key, blocks in self._index.items() for block in blocks}
        assert indexed == {b: key for b, key in enumerate(self._hashes) if key is not None}

    def free_list(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        blocks, block = [], self._next[NULL_BLOCK]
        while block != NULL_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1
