"""Phase 2: continuous batching on two tracks, as vLLM's V0 did it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.baselines.base import BaselineScheduler
from engine.config import EngineConfig
from engine.request import Request, RequestStatus
from engine.step import AdmissionStop, Rows, StepPlan

WATERMARK_SHARE = 0.01
"""Share of the blocks that an admission leaves free, so that it is not preempted at once. V0's value."""


@dataclass(slots=True)
class _Step:
    """The plan while it is made."""

    rows: Rows = field(default_factory=Rows)
    admitted: dict[str, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class TwoTrackScheduler(BaselineScheduler):
    """A step is either prefill or decode. Waiting requests that fit are prefilled first; if there are none,
    all running requests decode a token.

    A prompt is never split, so a long one takes a step of its own length, in which no request decodes. When
    the blocks run out, the last admitted are preempted: by recompute (blocks freed, back to the head of the
    queue, everything computed anew) or by swap (blocks copied to host memory and back, before any other
    request is admitted). Where the host has no room it is recompute.

    ``num_host_blocks`` is the size of the swap space; it is used with ``preemption_mode`` "swap" only.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int = 0) -> None:
        super().__init__(config, num_blocks, config.enable_prefix_caching)
        self.swapped: deque[Request] = deque()
        """Swapped out, in the order in which they come back."""
        self._free_host = list(range(num_host_blocks))
        self._host_tables: dict[str, list[int]] = {}
        """Host blocks of each swapped request, by id, in table order."""
        self._num_host_blocks = num_host_blocks
        self._watermark = int(WATERMARK_SHARE * (num_blocks - 1))

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.swapped)

    @property
    def num_free_host_blocks(self) -> int:
        """What is left of the swap space."""
        return len(self._free_host)

    def schedule(self) -> StepPlan:
        step = _Step()
        stop = AdmissionStop.SWAPPED if self.swapped else self._prefill(step)
        if not step.rows:
            self._decode(step)
            if step.preempted:
                stop = AdmissionStop.PREEMPTION
            else:
                self._swap_in(step)
        return self._plan(
            step.rows,
            stop,
            admitted=step.admitted,
            preempted=step.preempted,
            swap_out=tuple(step.swap_out),
            swap_in=tuple(step.swap_in),
        )

    def _prefill(self, step: _Step) -> AdmissionStop | None:
        """Admit whole prompts from the head of the queue until something stops it."""
        budget = self.config.max_num_batched_tokens
        while self.waiting:
            if len(self.running) >= self.config.max_num_seqs:
                return AdmissionStop.SEQUENCES
            request = self.waiting.peek()
            hits = self.kv.lookup(request)
            num_tokens = request.num_tokens - len(hits) * self.kv.block_size
            if num_tokens > budget:
                return AdmissionStop.BUDGET
            if not self._has_room(request.num_tokens, hits) or not self.kv.admit(request, hits, num_tokens):
                return AdmissionStop.BLOCKS
            step.admitted[request.request_id] = request.num_computed_tokens
            budget -= self._compute(self._admit(), step.rows)
        return None

    def _has_room(self, num_tokens: int, hits: list[int]) -> bool:
        """Blocks for a sequence of ``num_tokens``, and the watermark beside it where others run."""
        pool = self.kv.pool
        missing = -(-num_tokens // self.kv.block_size) - len(hits) + pool.count_free(hits)
        return missing + (self._watermark if self.running else 0) <= pool.num_free

    def _decode(self, step: _Step) -> None:
        """One token for each running request, in order, preempting from the tail for blocks."""
        index = 0
        while index < len(self.running):
            request = self.running[index]
            while not self.kv.extend(request, 1):
                self._preempt(self.running.pop(), step)
                if request.status is not RequestStatus.RUNNING:
                    return
            self._compute(request, step.rows)
            index += 1

    def _preempt(self, request: Request, step: _Step) -> None:
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        step.preempted.append(request)
        swaps = self.config.preemption_mode == "swap"
        if swaps and len(request.block_ids) <= self.num_free_host_blocks:
            table = [self._free_host.pop() for _ in request.block_ids]
            step.swap_out += zip(request.block_ids, table, strict=True)
            self._host_tables[request.request_id] = table
            request.status = RequestStatus.SWAPPED
            self.kv.free(request)
            self.swapped.appendleft(request)
            return
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.put_back(request)

    def _swap_in(self, step: _Step) -> None:
        """Bring requests back while there is room; they decode in this step."""
        while self.swapped and len(self.running) < self.config.max_num_seqs:
            request = self.swapped[0]
            if not self._has_room(request.num_tokens, []) or not self.kv.extend(request, 1):
                return
            self.swapped.popleft()
            table = self._host_tables.pop(request.request_id)
            step.swap_in += zip(table, request.block_ids, strict=False)  # the table may have grown by one
            self._free_host += table
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self._compute(request, step.rows)

    def _queued(self) -> Iterable[Request]:
        return [*self.waiting, *self.swapped]

    def _take_out(self, request: Request) -> None:
        if request.status is RequestStatus.SWAPPED:
            self.swapped.remove(request)
            self._free_host += self._host_tables.pop(request.request_id)
        else:
            super()._take_out(request)

    def check(self) -> None:
        super().check()
        tables = [block for table in self._host_tables.values() for block in table]
        assert sorted([*tables, *self._free_host]) == list(range(self._num_host_blocks))
        assert set(self._host_tables) == {request.request_id for request in self.swapped}
        for request in self.swapped:
            table = self._host_tables[request.request_id]
            assert len(table) * self.kv.block_size >= request.num_computed_tokens
