"""Phase 1: static batching, as a script around ``model.generate`` does it."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.lab.base import LabScheduler
from engine.step import AdmissionStop, Rows, StepPlan


class StaticBatchScheduler(LabScheduler):
    """A batch is formed of whoever waits when the last one has ended, and nobody joins or leaves it.

    Prompts are padded to the longest of the batch, and who has ended goes on as padding until the last member
    ends. KV is reserved at the start, for every member as much as the longest prompt and the longest
    ``max_tokens`` of the batch can need: one tensor of [members, longest] tokens, so that nobody is ever
    preempted. Prefixes are not shared.

    A batch does not wait to be full: when the engine is idle, whoever comes is a batch.
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        super().__init__(config, num_blocks, enable_prefix_caching=False)
        self._width = 0
        """Members of the batch that runs, those that have ended included."""

    def schedule(self) -> StepPlan:
        rows = Rows()
        if self.running:
            for request in self.running:
                self._compute(request, rows)
            return self._plan(
                rows, AdmissionStop.BATCH, admitted={}, padding=(1,) * (self._width - len(rows))
            )
        stop = self._form_batch()
        for request in self.running:
            self._compute(request, rows)
        longest = max(rows.counts, default=0)
        padding = tuple(longest - count for count in rows.counts if count < longest)
        return self._plan(
            rows, stop, admitted={request.request_id: 0 for request in self.running}, padding=padding
        )

    def _form_batch(self) -> AdmissionStop | None:
        """Admit from the head of the queue what fits, padded, into sequences, budget and memory."""
        members = prompt = output = blocks = 0
        stop = None
        for request in self.waiting:
            longer_prompt = max(prompt, request.num_prompt_tokens)
            longer_output = max(output, request.sampling.max_tokens)
            reserve = -(-min(longer_prompt + longer_output, self.max_model_len) // self.kv.block_size)
            stop = self._too_much(members + 1, longer_prompt, reserve)
            if stop is not None:
                break
            members, prompt, output, blocks = members + 1, longer_prompt, longer_output, reserve
        for _ in range(members):
            self.kv.extend(self._admit(), blocks * self.kv.block_size)
        self._width = members
        return stop

    def _too_much(self, members: int, prompt: int, blocks: int) -> AdmissionStop | None:
        """What a batch of so many members, of so many prompt tokens and KV blocks each, would exceed."""
        if members > self.config.max_num_seqs:
            return AdmissionStop.SEQUENCES
        if members * prompt > self.config.max_num_batched_tokens:
            return AdmissionStop.BUDGET
        if members * blocks > self.kv.pool.num_free:
            return AdmissionStop.BLOCKS
        return None
