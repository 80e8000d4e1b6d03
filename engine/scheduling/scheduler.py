"""The scheduling policy: one token budget per step, no prefill or decode phase.

A request gets ``min(what it lacks, every cap)``. It lacks its tokens (prompt and outputs) and drafts that are
not computed yet: 1 when it decodes, 1 + k with k drafts, thousands when it is new or was preempted. Running
requests are served first, in order; the rest of the budget admits waiting requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.kv.kv_cache import KVCacheManager
from engine.kv.kv_loading import KVLoading
from engine.kv.kv_offload import HostOffload
from engine.request import GateError, Request, RequestStatus
from engine.scheduling.async_plan import reconcile
from engine.scheduling.budget import PartialPrefills, StepBudget
from engine.scheduling.decode_fast_path import (
    append_tokens,
    drop_ended,
    land_tokens,
    plan_decodes,
    plan_decodes_ahead,
)
from engine.scheduling.scheduler_base import SchedulerBase
from engine.scheduling.waiting import make_queue
from engine.step import (
    NO_FAST_DECODES,
    PLACEHOLDER_TOKEN_ID,
    AdmissionStop,
    FastDecodes,
    OneEach,
    Outputs,
    RequestOutput,
    Rows,
    StepOutput,
    StepPlan,
    StepResult,
)


@dataclass(slots=True)
class Planning:
    """The plan while it is made."""

    budget: StepBudget
    threshold: int
    """``long_prefill_token_threshold`` where it applies in this step, else 0."""
    partial: PartialPrefills
    """Set once the running requests have their share."""
    scheduled: Rows = field(default_factory=Rows)
    fast_decodes: FastDecodes = NO_FAST_DECODES
    admitted: dict[str, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    aside: list[Request] = field(default_factory=list)
    """Requests passed over in this step, which do not block the queue behind them; in the queue's order."""
    aside_for: AdmissionStop | None = None
    """Why the first of them was passed over."""
    adapters: frozenset[str] = frozenset()
    """Of the requests that are scheduled; set once the running requests have their share."""
    any_running: bool = False
    """A request that was running before this step is scheduled in it."""
    any_mid_prefill: bool = False
    """... and was mid-prefill when the step began."""


class UnifiedScheduler(SchedulerBase):
    """vLLM V1's scheduler. ``schedule()``, run the plan, ``update()``; the same again.

    ``config.max_model_len`` is resolved, and ``num_blocks`` includes the null block. A request that can
    never fit into the pool would wait forever, and block the queue: the memory plan rules that out.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, num_host_blocks: int = 0) -> None:
        kv = KVCacheManager(num_blocks, config.block_size, config.enable_prefix_caching)
        super().__init__(config, kv, make_queue(config.scheduling_policy))
        self.loading = KVLoading(self.kv, HostOffload(self.kv, num_host_blocks) if num_host_blocks else None)
        drafts_ahead = config.num_speculative_tokens if config.async_scheduling else 0
        self.uses_fast_path = not (config.num_lookahead_tokens or drafts_ahead)
        """False leaves everything to the rule loop, which decides the same and takes longer."""
        self.unhashes_preempted = True
        """Take the hashes off blocks of a preempted request that this step would have computed. vLLM 0.33
        leaves them, and a later prefix hit reads blocks that were never computed. False does the same, for
        explain."""
        speculative = config.speculative_config
        self._drops_last_hit = speculative is not None and speculative.method == "eagle"
        self._max_drafting = config.max_drafting

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError for one that could never finish, or an id in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r}: a request of this id is unfinished")
        request.check_size(self.max_model_len)
        self._requests[request.request_id] = request
        request.length_limit = min(
            self.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens
        )
        eos = () if request.sampling.ignore_eos else request.eos_token_ids
        request.stop_set = frozenset((*eos, *request.sampling.stop_token_ids))
        if request.gate is not None:
            request.status = request.gate.status
        self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Drop requests and free their blocks at once. Returns those that were unfinished, each only once.

        Tokens in flight for them are ignored by :meth:`update`.
        """
        aborted = []
        for request_id in request_ids:
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            self.loading.let_go(request)
            request.status = RequestStatus.FINISHED_ABORTED
            aborted.append(request)
        return aborted

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, and on demand what the KV connector has. False while any request holds a
        block: then nothing happens."""
        self.loading.reap()
        connector = self.loading.connector if reset_connector else None
        return self.kv.reset_prefix_cache() and (connector is None or connector.reset())

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan:
        """Decide the next step. ``num_computed_tokens`` moves on at once, before the step has run."""
        self.loading.reap()
        alive = len(self.running) + len(self.waiting)
        step = Planning(
            budget=StepBudget.of(self.config),
            threshold=self.config.prefill_threshold if alive > 1 else 0,
            partial=PartialPrefills(),
        )
        if len(self.running) > self._max_drafting:
            for request in self.running:
                request.spec_token_ids = []
        self._schedule_running(step)
        stop = AdmissionStop.PREEMPTION if step.preempted else self._schedule_waiting(step)
        for request in reversed(step.aside):
            self.waiting.put_back(request)
        plan = StepPlan(
            step=self._num_steps,
            scheduled=step.scheduled,
            fast_decodes=step.fast_decodes,
            token_budget=self.config.step_tokens,
            admitted_with_computed=step.admitted,
            preempted=tuple([request.request_id for request in step.preempted]),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_deferred=len(step.aside),
            free_blocks=self.kv.pool.num_free,
            admission_stop=stop if self.waiting else None,
            failed=tuple(step.failed),
            transfers=self.loading.transfers(),
        )
        self._num_steps += 1
        return plan

    def _schedule_running(self, step: Planning) -> None:
        """Serve the running requests in order while budget remains, preempting for blocks."""
        index = 0
        if self.uses_fast_path:
            index = self._plan_fast_path(step)
        while index < len(self.running) and step.budget.left > 0:
            request = self.running[index]
            num_tokens = self._tokens_for_running(request, step)
            if num_tokens <= 0:
                index += 1
                continue
            index = self._make_room(request, index, num_tokens, step)
            if request.status is RequestStatus.RUNNING:
                step.any_mid_prefill |= request.mid_prefill
                self._take(request, num_tokens, request.spec_token_ids, step)
                index += 1
        step.any_running = bool(step.scheduled)

    def _plan_fast_path(self, step: Planning) -> int:
        """The decode fast path for the head of ``running``. Returns how many requests it handled."""
        if self.config.async_scheduling:
            step.scheduled, index = plan_decodes_ahead(self.running, step.budget.left, self.kv)
        else:
            step.scheduled = plan_decodes(self.running, step.budget.left, self.kv)
            index = len(step.scheduled)
        step.budget.take(len(step.scheduled), len(step.scheduled))
        return index

    def _tokens_for_running(self, request: Request, step: Planning) -> int:
        computed, unknown = request.num_computed_tokens, request.num_placeholders
        if unknown and computed + 2 - unknown >= request.num_prompt_tokens + request.sampling.max_tokens:
            return 0  # the step in flight brings its last token, even if all drafts are rejected
        lacks = request.num_tokens + unknown + len(request.spec_token_ids) - computed
        if 0 < step.threshold < lacks:
            lacks = step.threshold
        return min(lacks, step.budget.left, self.max_model_len - computed - 1)

    def _make_room(self, request: Request, index: int, num_tokens: int, step: Planning) -> int:
        """Allocate blocks for ``num_tokens`` more of the request at ``index``, preempting others if needed.

        Returns the index at which the loop continues, as victims may have stood before it. The request
        itself can be the victim: it is then no longer RUNNING, and the next one stands at the index. Under
        FCFS it was the last, and the loop ends.
        """
        while not self._extend(request, num_tokens):
            if self.loading.take_back():
                continue
            victim = self._victim_index()
            if victim < index:
                index -= 1
            self._preempt(victim, step)
            if request.status is not RequestStatus.RUNNING:
                break
        return index

    def _extend(self, request: Request, num_tokens: int) -> bool:
        lookahead = self._lookahead(request.num_computed_tokens, num_tokens)
        return self.kv.extend(request, num_tokens, lookahead)

    def _lookahead(self, start: int, num_tokens: int) -> int:
        """KV slots beyond ``num_tokens`` from ``start`` on, into which a draft model writes."""
        return min(self.config.num_lookahead_tokens, self.max_model_len - start - num_tokens)

    def _victim_index(self) -> int:
        """FCFS: the last admitted. Priority: the worst (priority, arrival), scheduled already or not."""
        if self.config.scheduling_policy == "fcfs":
            return len(self.running) - 1
        keys = [(request.priority, request.arrival_time) for request in self.running]
        return keys.index(max(keys))

    def _preempt(self, index: int, step: Planning) -> None:
        """Back to waiting, to be computed anew; what this step gave it is returned."""
        request = self.running.pop(index)
        if taken := step.scheduled.remove(request):
            step.budget.give_back(taken)
            if self.unhashes_preempted:
                self.kv.forget(request, request.num_computed_tokens - taken)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_external_tokens = 0
        request.spec_token_ids = []
        request.num_placeholders = 0
        request.mid_prefill = False
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.put_back(request)
        step.preempted.append(request)

    def _schedule_waiting(self, step: Planning) -> AdmissionStop | None:
        """Admit from the head of the queue until something stops it. The head is overtaken only where it is
        set aside."""
        step.partial = PartialPrefills.of(self.config, step.scheduled)
        if self.config.enable_lora:
            step.adapters = frozenset([request.lora_name for request in step.scheduled.requests]) - {""}
        while self.waiting:
            if step.budget.left <= 0:
                return AdmissionStop.BUDGET
            if len(self.running) >= self.config.max_num_seqs:
                return AdmissionStop.SEQUENCES
            request = self.waiting.peek()
            if not self._is_open(request, step):
                continue
            if request.lora_name and not self._has_slot(request.lora_name, step):
                self._set_aside(AdmissionStop.ADAPTERS, step)
                continue
            holds = bool(request.block_ids)
            hits = request.block_ids if holds else self._lookup(request)
            computed = request.num_computed_tokens if holds else len(hits) * self.kv.block_size
            if not holds and (external := self.loading.match(request, computed)):
                while not self.kv.receive(request, hits, external):
                    if not self.loading.take_back(request):
                        return AdmissionStop.BLOCKS
                self.loading.begin(request, external)
                self._set_aside(AdmissionStop.GATE, step)
                continue
            drafts: list[int] = []
            if self._pads(request, computed, step):
                drafts = [PLACEHOLDER_TOKEN_ID] * self.config.num_speculative_tokens
                num_tokens = 1 + len(drafts)
                if num_tokens > step.budget.left:
                    return AdmissionStop.PADDING
            else:
                num_tokens = request.num_tokens - computed
                if 0 < step.threshold < num_tokens:
                    num_tokens = step.threshold
                if num_tokens > step.budget.left and not self.config.enable_chunked_prefill:
                    return AdmissionStop.CHUNKING
                num_tokens = min(num_tokens, step.budget.left)
            lacks = request.num_tokens - computed
            if num_tokens < lacks and (reason := step.partial.refuse(lacks)) is not None:
                self._set_aside(reason, step)
                continue
            lookahead = self._lookahead(computed, num_tokens)
            while not (
                self.kv.resume(request, num_tokens, lookahead)
                if holds
                else self.kv.admit(request, hits, num_tokens, lookahead)
            ):
                if not self.loading.take_back(request):
                    return AdmissionStop.BLOCKS
            if num_tokens < lacks:
                step.partial.take(lacks)
            self._admit(step)
            self._take(request, num_tokens, drafts, step)
            if request.lora_name:
                step.adapters |= {request.lora_name}
        return step.aside_for

    def _lookup(self, request: Request) -> list[int]:
        hits = self.kv.lookup(request)
        # EAGLE needs the target's hidden states of what comes before its token
        return hits[:-1] if self._drops_last_hit else hits

    def _is_open(self, request: Request, step: Planning) -> bool:
        """Whether the head of the queue has no gate, or an open one. Otherwise it is taken out of the
        queue."""
        if request.gate is None:
            return True
        try:
            if request.gate.ready():
                self.loading.open(request, request.gate)
                return True
            self._set_aside(AdmissionStop.GATE, step)
        except GateError as error:
            request.error = str(error)
            step.failed.append(self.waiting.pop())
            self._finish(request, RequestStatus.FINISHED_ERROR)
        return False

    def _has_slot(self, adapter: str, step: Planning) -> bool:
        """Whether the step has the adapter, or room for one more."""
        return adapter in step.adapters or len(step.adapters) < self.config.max_loras

    def _set_aside(self, reason: AdmissionStop, step: Planning) -> None:
        """Pass over the head of the queue in this step."""
        step.aside.append(self.waiting.pop())
        step.aside_for = step.aside_for or reason

    def _pads(self, request: Request, computed: int, step: Planning) -> bool:
        """Whether a request that lacks one token is admitted with placeholder drafts beside it.

        A step of nothing but (1 token + k drafts) per request has one shape, which a GPU replays from a
        captured graph; one odd request would break that. vLLM does the same.
        """
        width = 1 + self.config.num_speculative_tokens
        return (
            width > 1
            and len(self.running) < self._max_drafting
            and request.num_tokens - computed == 1
            and not step.any_mid_prefill
            and (step.any_running or computed > 0)
            and computed + width + 1 <= self.max_model_len
        )

    def _admit(self, step: Planning) -> None:
        """Move the head of the queue, which has its blocks, to the tail of ``running``."""
        request = self.waiting.pop()
        self.loading.admitted(request)
        if request.status is RequestStatus.WAITING:
            self._count_hits(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        step.admitted[request.request_id] = request.num_computed_tokens

    def _count_hits(self, request: Request) -> None:
        cached = request.num_cached_tokens = request.num_computed_tokens
        local = cached - request.num_external_tokens
        if self.config.enable_prefix_caching:
            self.stats.prefix_queries += request.num_tokens
            self.stats.prefix_hits += local
        if self.loading.connector is not None:
            self.stats.external_queries += request.num_tokens - local
            self.stats.external_hits += cached - local

    def _take(self, request: Request, num_tokens: int, drafts: list[int], step: Planning) -> None:
        """Put the request's next ``num_tokens`` into the plan. Drafts beyond them are discarded."""
        start = request.num_computed_tokens
        beyond_own = start + num_tokens - request.num_tokens - request.num_placeholders
        request.num_computed_tokens = start + num_tokens
        request.mid_prefill = beyond_own < 0
        step.budget.take(num_tokens)
        taken = tuple(drafts[: max(beyond_own, 0)])
        step.scheduled.append(request, start, num_tokens, taken, beyond_own >= 0)
        request.spec_token_ids = []
        if self.config.async_scheduling and beyond_own >= 0:
            request.num_placeholders += 1 + len(taken)
            request.spec_token_ids = self._unknown_drafts()

    def _unknown_drafts(self) -> list[int]:
        """With async scheduling: placeholders for the drafts of the step after next."""
        drafting = len(self.running) <= self._max_drafting
        return [PLACEHOLDER_TOKEN_ID] * self.config.num_speculative_tokens if drafting else []

    def reconcile(self, plan: StepPlan) -> StepPlan:
        """``plan``, made while the step before it computed, in line with the outcome of that step."""
        return drop_ended(plan) if self.uses_fast_path else reconcile(plan, self._unknown_drafts())

    # ------------------------------------------------------------------ update

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append what the step emitted, take back what it rejected, finish the requests that have ended.

        Requests that were aborted since the plan was made are ignored.
        """
        tokens = result.tokens
        special = plan.failed or plan.rows.drafts or result.drafts or result.logprobs
        if self.uses_fast_path and isinstance(tokens, OneEach) and not special:
            return self._update_fast_path(tokens)
        outputs = Outputs.of(map(RequestOutput.refused, plan.failed))
        finished = list(plan.failed)
        accepted_per_draft: list[tuple[int, int]] = []
        for item in plan.scheduled:
            request = item.request
            if not item.emits or request.status is not RequestStatus.RUNNING:
                continue
            emitted = tokens[request.request_id]
            output = self._append(request, emitted, len(item.drafts))
            if request.request_id in result.logprobs:
                logprobs = result.logprobs[request.request_id][: len(output.token_ids)]
                output = output._replace(logprobs=tuple(logprobs))
            outputs.append(output)
            if item.drafts and item.drafts[0] != PLACEHOLDER_TOKEN_ID:
                accepted_per_draft.append((len(item.drafts), len(emitted) - 1))
            if output.finish is not None:
                self._finish(request, output.finish)
                finished.append(request)
            else:
                request.spec_token_ids = list(result.drafts.get(request.request_id, ()))
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return StepOutput.of(outputs, finished, accepted_per_draft)

    def _update_fast_path(self, tokens: OneEach) -> StepOutput:
        """The same where every request emitted one token, and no request had or gets drafts."""
        if self.config.async_scheduling:
            land_tokens(tokens.requests, self.kv)
        outputs, ends = append_tokens(tokens.requests, tokens.token_ids)
        finished = []
        for row, request in ends:
            token = outputs.token_ids[row]
            finish, reason = request.stops_with(token, self.max_model_len)
            if finish is not None:
                outputs.others[row] = RequestOutput(request.request_id, (token,), finish, reason)
                self._finish(request, finish)
                finished.append(request)
        if finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return StepOutput(outputs, tuple(finished))

    def _append(self, request: Request, emitted: list[int], num_drafts: int) -> RequestOutput:
        """Append token by token up to a stop. Rejected drafts and what follows a stop are not computed."""
        kept, finish, reason = 0, None, None
        for token in emitted:
            request.token_ids.append(token)
            kept += 1
            finish, reason = request.stops_with(token, self.max_model_len)
            if finish is not None:
                break
        rejected = num_drafts - (len(emitted) - 1)
        dropped = len(emitted) - kept
        request.num_computed_tokens -= rejected + dropped
        if self.config.async_scheduling:
            request.num_placeholders -= 1 + num_drafts
        self.kv.hash_blocks(request, request.num_computed_tokens - request.num_placeholders)
        return RequestOutput(request.request_id, tuple(emitted[:kept]), finish, reason)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Forget the request and free its blocks; the caller takes it out of ``running``."""
        del self._requests[request.request_id]
        self.kv.free(request)
        request.status = status

    def check(self) -> None:
        """Assert every invariant of queues, requests, block tables and pool. Slow: for tests."""
        waiting = list(self.waiting)
        assert len(self.running) <= self.config.max_num_seqs
        assert {id(r) for r in [*self.running, *waiting]} == {id(r) for r in self._requests.values()}
        assert len(self._requests) == len(self.running) + len(waiting)
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens < self.max_model_len
        for request in waiting:
            if request.gate is None:
                assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            else:
                assert request.status is request.gate.status
            assert not request.spec_token_ids
            assert not request.mid_prefill
            if not self.loading.holds(request):
                assert not request.block_ids
                assert request.num_computed_tokens == request.num_hashed_blocks == 0
        self.loading.check(self._requests.values())
