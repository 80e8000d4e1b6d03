"""Phase 1: static batching, as a script around ``model.generate`` does it."""

from __future__ import annotations

from collections import deque

from engine.baselines.base import BaselineScheduler
from engine.config import EngineConfig
from engine.request import Request, RequestStatus
from engine.step import AdmissionStop, Rows, StepPlan


class StaticBatchScheduler(BaselineScheduler):
    """A batch is formed of the requests that wait when the last batch has ended. None joins it later.

    Prompts are padded to the longest of the batch, and a member that has ended remains as padding until the
    last one ends. The padded prompts take as many steps as the token budget asks for; decoding starts when
    all of them are computed. KV is reserved at the start: every member gets what the longest prompt and the
    longest ``max_tokens`` of the batch can need, one tensor of [members, longest] tokens. So there are no
    preemptions. Prefixes are not shared.

    A batch does not wait to be full: an idle engine starts with the first request. Tokens are reported as
    they come, not at the end of the batch as ``generate`` does.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks, enable_prefix_caching=False)
        self._members = self._longest = 0
        """Of the batch that runs: how many it had at its start, and their longest prompt in tokens."""
        self._fresh: deque[Request] = deque()
        """Members whose prompts are not computed yet."""

    def schedule(self) -> StepPlan:
        admitted: dict[str, int] = {}
        stop: AdmissionStop | None = AdmissionStop.BATCH
        if not self.running:
            stop = self._form_batch()
            admitted = {request.request_id: 0 for request in self.running}
        rows = self._prefill() if self._fresh else Rows()
        if rows:
            padding = tuple(self._longest - count for count in rows.counts if count < self._longest)
        else:
            for request in self.running:
                self._compute(request, rows)
            padding = (1,) * (self._members - len(rows) if rows else 0)
        return self._plan(rows, stop, admitted=admitted, padding=padding)

    def _form_batch(self) -> AdmissionStop | None:
        """Admit from the head of the queue what sequences and memory have room for, padded."""
        members = prompt = output = blocks = 0
        stop = None
        for request in self.waiting:
            longer_prompt = max(prompt, request.num_prompt_tokens)
            longer_output = max(output, request.sampling.max_tokens)
            each = -(-min(longer_prompt + longer_output, self.max_model_len) // self.kv.block_size)
            if members == self.config.max_num_seqs:
                stop = AdmissionStop.SEQUENCES
            elif (members + 1) * each > self.kv.pool.num_free:
                stop = AdmissionStop.BLOCKS
            if stop is not None:
                break
            members, prompt, output, blocks = members + 1, longer_prompt, longer_output, each
        for _ in range(members):
            self.kv.extend(self._admit(), blocks * self.kv.block_size)
        self._members, self._longest, self._fresh = members, prompt, deque(self.running)
        return stop

    def _prefill(self) -> Rows:
        """The next prompts of the batch, as many as fit padded into the token budget."""
        rows = Rows()
        room = self.config.max_num_batched_tokens // self._longest
        while self._fresh and len(rows) < room:
            request = self._fresh.popleft()
            if request.status is RequestStatus.RUNNING:  # or it was aborted
                self._compute(request, rows)
        return rows
