"""Fast decode: plan requests that decode plainly without visiting each in every step. For simulations only,
where all emitted tokens are the same.

What such a request does is known ahead: one token per step, a block when it enters one, a hash when it has
filled one, up to its last token. The requests at the head of ``running`` that decode plainly are a
:class:`Cohort`, which a step touches only where one of them enters or fills a block, or ends. Tests hold
plans, pool, metrics and records equal to those of the plain scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import repeat

from engine.config import EngineConfig
from engine.kv.kv_cache import KVCacheManager
from engine.request import Request
from engine.scheduling.scheduler import Planning, UnifiedScheduler
from engine.step import FastDecodes, Outputs, Rows, StepOutput, StepPlan, StepResult


@dataclass(slots=True, eq=False)
class _Member:
    """A request with its fields as of ``step``; it has gained a token in each step since."""

    request: Request
    step: int


class Cohort:
    """Requests that all decode one token per step. ``token`` is what each of them emits."""

    def __init__(self, kv: KVCacheManager, token: int) -> None:
        self.joined: list[str] = []
        """Ids of the requests that have joined since the last step was planned."""
        self._kv, self._token = kv, token
        self._step = 0
        """Number of the next step."""
        self._context = 0
        """Tokens computed of all members."""
        self._members: dict[str, _Member] = {}
        self._phases: list[dict[str, _Member]] = [{} for _ in range(kv.block_size)]
        """By the step, modulo the block size, in which they enter a block. As they join in the order of
        ``running``, they stand in that order here."""
        self._ends: dict[int, list[_Member]] = {}
        """Step -> members that it brings the last token. Some may have left before."""
        self._left: list[str] = []

    def __len__(self) -> int:
        return len(self._members)

    @property
    def num_entering(self) -> int:
        """How many need a block in the next step."""
        return len(self._phases[self._step % self._kv.block_size])

    @property
    def all_stay(self) -> bool:
        """False if the next step may bring a member its last token."""
        return self._step not in self._ends

    def join(self, requests: Iterable[Request]) -> None:
        """Requests that have just emitted a token, and stand behind all members in ``running``."""
        for request in requests:
            name, computed, size = request.request_id, request.num_computed_tokens, self._kv.block_size
            member = self._members[name] = _Member(request, self._step)
            self._phases[(self._step - computed) % size][name] = member
            self._ends.setdefault(self._step + request.length_limit - 2 - computed, []).append(member)
            self._context += computed
            self.joined.append(name)

    def advance(self) -> tuple[FastDecodes, Rows]:
        """Plan the next step: the members that stay, and rows for those that it brings their last token."""
        self._book_blocks()
        last = Rows()
        if not self.all_stay:
            for member in self._ends.pop(self._step):
                if self._members.get(member.request.request_id) is member:
                    self._end(member, last)
        decodes = FastDecodes(len(self), self._context, tuple(self._left))
        self._step += 1
        self._context += len(self)
        self._left, self.joined = [], []
        return decodes, last

    def dissolve(self) -> None:
        """Remove all members."""
        self._left += self._members
        for name in list(self._members):
            self.drop(name)

    def drop(self, request_id: str) -> None:
        """Remove a member, if it is one, with its fields brought up to date."""
        if member := self._members.pop(request_id, None):
            self._catch_up(member)
            computed = member.request.num_computed_tokens
            self._context -= computed
            del self._phases[(self._step - computed) % self._kv.block_size][request_id]

    def catch_up(self) -> None:
        """Bring the fields of all members up to date."""
        for member in self._members.values():
            self._catch_up(member)

    def _book_blocks(self) -> None:
        """As :func:`engine.scheduling.decode_fast_path.plan_decodes` does.

        The caller has checked that enough blocks are free.
        """
        size = self._kv.block_size
        if entering := self._phases[self._step % size]:
            self._kv.take_one_each([member.request for member in entering.values()])
        if filling := self._phases[(self._step + 1) % size]:
            for member in filling.values():
                self._catch_up(member)
            self._kv.hash_one_each([member.request for member in filling.values()])

    def _end(self, member: _Member, rows: Rows) -> None:
        request = member.request
        self.drop(request.request_id)
        self._left.append(request.request_id)
        rows.append(request, request.num_computed_tokens, 1)
        request.num_computed_tokens += 1

    def _catch_up(self, member: _Member) -> None:
        steps, request = self._step - member.step, member.request
        request.num_computed_tokens += steps
        request.token_ids.extend(repeat(self._token, steps))
        member.step = self._step


class FastDecodeScheduler(UnifiedScheduler):
    """Decides as the unified scheduler does. Its plans have no rows for the members of the cohort.

    For runners that emit ``token`` for every request, without speculation, connectors and async scheduling.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, *, token: int) -> None:
        super().__init__(config, num_blocks)
        self.cohort = Cohort(self.kv, token)
        self._token = token

    def plan_fast_decodes(self) -> FastDecodes | None:
        """Plan a step in which all running requests are in the cohort and none ends; None where there is more
        to do.

        Only valid while no request has been added or aborted since the last step: then none can be admitted,
        unless a sequence slot is free.
        """
        cohort, size = self.cohort, len(self.running)
        if not size or len(cohort) < size or (self.waiting and size < self.config.max_num_seqs):
            return None
        if cohort.num_entering > self.kv.pool.num_free or not cohort.all_stay:
            return None
        self._num_steps += 1
        return cohort.advance()[0]

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        names = list(request_ids)
        for name in names:
            self.cohort.drop(name)
        return super().abort(names)

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        output = super().update(plan, result)
        if len(self.running) > len(self.cohort):
            self.cohort.join(self._joining(set(Outputs.of(output.outputs).request_ids)))
        return output

    def check(self) -> None:
        self.cohort.catch_up()
        super().check()

    def _joining(self, emitted: set[str]) -> Iterable[Request]:
        """The requests right behind the cohort that decode plainly as well."""
        for request in self.running[len(self.cohort) :]:
            plain = request.num_computed_tokens + 1 == request.num_tokens and not request.mid_prefill
            if not plain or request.request_id not in emitted or self._token in request.stop_set:
                return
            yield request

    def _plan_fast_path(self, step: Planning) -> int:
        size = len(self.cohort)
        if size and (size > step.budget.left or not self._has_room(step)):
            self.cohort.dissolve()
            size = 0
        step.fast_decodes, step.scheduled = self.cohort.advance()
        if not size:
            return super()._plan_fast_path(step)
        step.budget.take(size, size)
        return size

    def _has_room(self, step: Planning) -> bool:
        """Whether no running request can need a block that is not free. If one can, a request is preempted,
        and it must be up to date."""
        left = step.budget.left - len(self.cohort)
        needed = self.cohort.num_entering
        for request in self.running[len(self.cohort) :]:
            lacks = min(request.num_tokens - request.num_computed_tokens, left)
            needed += lacks // self.kv.block_size + 1
        return needed <= self.kv.pool.num_free

    def _preempt(self, index: int, step: Planning) -> None:
        assert not self.cohort, "its members are not up to date"
        super()._preempt(index, step)
