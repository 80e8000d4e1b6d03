"""Helpers for scheduler tests: a pretended model, and every invariant checked at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.scheduling.scheduler import UnifiedScheduler
from engine.speculative_config import SpeculativeConfig
from engine.step import PLACEHOLDER_TOKEN_ID, OneEach, StepOutput, StepPlan, StepResult

Emit = Callable[[Request, Sequence[int]], list[int]]
"""What a request emits, given its drafts (placeholders left out): some of these, and one more token."""
Propose = Callable[[Request, Sequence[int]], list[int]]
"""The drafts after what was just emitted."""


def one_zero(request: Request, drafts: Sequence[int]) -> list[int]:
    """Emit token 0, rejecting all drafts."""
    return [0]


def all_accepted(request: Request, drafts: Sequence[int]) -> list[int]:
    return [*drafts, 0]


class ShadowKV:
    """What the KV cache would hold: for each slot, the whole token sequence up to and with that slot.

    A step writes all its tokens, then every request reads everything before its end, as attention does.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, int] = {}

    def run(self, plan: StepPlan) -> None:
        contents = {item.request.request_id: self._content(item) for item in plan.scheduled}
        for item in plan.scheduled:
            content = contents[item.request.request_id]
            for position in range(item.start, item.start + item.num_tokens):
                self.slots[self._slot(item.request, position)] = content[position]
        for item in plan.scheduled:
            content = contents[item.request.request_id]
            for position in range(item.start + item.num_tokens):
                held = self.slots.get(self._slot(item.request, position))
                assert held == content[position], f"{item.request.request_id} reads a wrong KV at {position}"

    def _content(self, item: Any) -> list[int]:
        prefix, content = hash((item.request.cache_salt, item.request.lora_name)), []
        for token in [*item.request.token_ids, *item.drafts][: item.start + item.num_tokens]:
            prefix = hash((prefix, token))
            content.append(prefix)
        return content

    def _slot(self, request: Request, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return request.block_ids[block] * self.block_size + offset


class Lab:
    """Drives a scheduler. ``add`` requests, ``step``; ``output`` is what the last step brought."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        k: int = 0,
        emit: Emit = one_zero,
        propose: Propose | None = None,
        **flags: Any,
    ) -> None:
        defaults: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        speculative = SpeculativeConfig(num_speculative_tokens=k) if k else None
        flags = {**defaults, "max_model_len": 64, "speculative_config": speculative, **flags}
        self.config = EngineConfig(**flags)
        self.scheduler = UnifiedScheduler(self.config, num_blocks)
        self.pool = self.scheduler.kv.pool
        self.shadow = ShadowKV(self.config.block_size)
        self.emit = emit
        self.propose = propose if propose is not None else lambda request, emitted: [0] * k
        self.output = StepOutput(())
        self.num_added = 0

    def add(
        self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 16, **fields: Any
    ) -> Request:
        """A request whose prompt is given, or that many tokens which no other request shares."""
        if isinstance(prompt, int):
            prompt = [1000 * (self.num_added + 1) + place for place in range(prompt)]
        sampling = fields.pop("sampling", None) or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        fields.setdefault("arrival_time", float(self.num_added))
        request = Request(request_id, list(prompt), sampling, **fields)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan:
        waited = list(self.scheduler.waiting)
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self._check_plan(plan, waited)
        return plan

    def execute(self, plan: StepPlan) -> StepResult:
        """What a runner would answer."""
        self.shadow.run(plan)
        tokens, drafts = {}, {}
        for item in plan.scheduled:
            if item.emits:
                verified = () if PLACEHOLDER_TOKEN_ID in item.drafts else item.drafts
                emitted = self.emit(item.request, verified)
                tokens[item.request.request_id] = emitted
                if proposed := self.propose(item.request, emitted):
                    drafts[item.request.request_id] = proposed
        if plan.rows.drafts or drafts:
            return StepResult(tokens, drafts)
        emitting = plan.rows.emitting  # one token each: in columns, as a runner in a hurry has them
        return StepResult(OneEach(emitting, [tokens[request.request_id][0] for request in emitting]))

    def update(self, plan: StepPlan, result: StepResult | None = None) -> StepOutput:
        self.output = self.scheduler.update(plan, self.execute(plan) if result is None else result)
        self.scheduler.check()
        return self.output

    def step(self) -> dict[str, int]:
        """One whole step; how many tokens each request got, in order."""
        plan = self.schedule()
        self.update(plan)
        return shares(plan)

    def finish(self, limit: int = 5000) -> list[StepPlan]:
        """Steps until no request is left; then everything must be free."""
        plans = []
        while self.scheduler.has_unfinished:
            plans.append(self.schedule())
            self.update(plans[-1])
            assert len(plans) < limit
        self.assert_all_free()
        return plans

    def assert_all_free(self) -> None:
        assert self.pool.num_free == self.pool.num_blocks - 1
        assert self.scheduler.kv_usage == 0.0

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def finished(self) -> list[str]:
        return [request.request_id for request in self.output.finished]

    def _check_plan(self, plan: StepPlan, waited: list[Request]) -> None:
        """What holds for every plan under every config."""
        assert plan.num_scheduled_tokens <= plan.token_budget == self.config.max_num_batched_tokens
        assert len(plan.scheduled) <= self.config.max_num_seqs
        assert len({item.request.request_id for item in plan.scheduled}) == len(plan.scheduled)
        adapters = {item.request.lora_name for item in plan.scheduled} - {""}
        assert len(adapters) <= self.config.max_loras
        for item in plan.scheduled:
            assert item.num_tokens >= 1
            assert len(item.drafts) <= self.config.num_speculative_tokens
            own_end = item.start + item.num_tokens - len(item.drafts)
            assert own_end == item.request.num_tokens if item.emits else own_end < item.request.num_tokens
            assert item.start + item.num_tokens < (self.config.max_model_len or 0)
        if plan.preempted:
            assert not plan.admitted_with_computed
        assert (plan.admission_stop is None) == (plan.num_waiting == 0)
        self._check_admission(plan, waited)

    def _check_admission(self, plan: StepPlan, waited: list[Request]) -> None:
        """The admitted are the head of the queue: only requests that were set aside are overtaken."""
        adapters = {item.request.lora_name for item in plan.scheduled} - {""}
        full = len(adapters) == self.config.max_loras
        aside = [
            request
            for request in waited
            if request.gate is not None
            or request in plan.failed
            or (full and request.lora_name not in {"", *adapters})
        ]
        turns = [request.request_id for request in waited if request not in aside]
        admitted = list(plan.admitted_with_computed)
        assert admitted == turns[: len(admitted)]


def shares(plan: StepPlan) -> dict[str, int]:
    return {item.request.request_id: item.num_tokens for item in plan.scheduled}
