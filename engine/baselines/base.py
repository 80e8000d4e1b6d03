"""What the baseline schedulers have in common: queues, blocks, and the booking of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from engine.config import EngineConfig
from engine.kv.kv_cache import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduling.scheduler_base import SchedulerBase
from engine.scheduling.waiting import FCFSQueue
from engine.step import AdmissionStop, RequestOutput, Rows, StepOutput, StepPlan, StepResult


class BaselineScheduler(SchedulerBase, ABC):
    """A scheduler of plain loops. First come, first served; a prompt is computed whole, in one step; no
    drafts.

    An :class:`engine.core.Scheduler`. ``config.max_model_len`` is resolved, and ``num_blocks`` includes the
    null block. A request that can never fit into the pool waits forever: the memory plan rules that out.
    """

    def __init__(self, config: EngineConfig, num_blocks: int, enable_prefix_caching: bool) -> None:
        kv = KVCacheManager(num_blocks, config.block_size, enable_prefix_caching)
        super().__init__(config, kv, FCFSQueue())

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError for one that could never finish, or an id in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r}: a request of this id is unfinished")
        if request.gate is not None:
            raise ValueError(
                f"request {request.request_id!r}: structured outputs and remote KV need --scheduler unified"
            )
        request.check_size(self.max_model_len)
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Drop requests and free their blocks at once. Returns those that were unfinished, each only once."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            self._take_out(request)
            self._finish(request, RequestStatus.FINISHED_ABORTED)
            aborted.append(request)
        return aborted

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False, and nothing happens, while any request holds a block. There is no KV
        connector."""
        return self.kv.reset_prefix_cache()

    @abstractmethod
    def schedule(self) -> StepPlan:
        """Decide the next step. ``num_computed_tokens`` moves on at once, before the step has run."""

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append what the step emitted, and finish the requests that have ended. Requests aborted meanwhile
        are ignored."""
        outputs: list[RequestOutput] = []
        finished: list[Request] = []
        for request in plan.rows.requests:
            name = request.request_id
            if request.status is not RequestStatus.RUNNING:
                continue
            (token,) = result.tokens[name]
            request.token_ids.append(token)
            self.kv.hash_blocks(request, request.num_computed_tokens)
            finish, reason = request.stops_with(token, self.max_model_len)
            logprobs = tuple(result.logprobs.get(name, ()))
            outputs.append(RequestOutput(name, (token,), finish, reason, logprobs))
            if finish is not None:
                self.running.remove(request)
                self._finish(request, finish)
                finished.append(request)
        return StepOutput(tuple(outputs), tuple(finished))

    def check(self) -> None:
        """Assert every invariant of queues, requests, block tables and pool. Slow: for tests."""
        queued = list(self._queued())
        alive = [*self.running, *queued]
        assert len(self.running) <= self.config.max_num_seqs
        assert len(alive) == len(self._requests)
        assert {id(request) for request in alive} == {id(request) for request in self._requests.values()}
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens <= request.num_tokens
        for request in queued:
            assert request.status is not RequestStatus.RUNNING
            assert not request.status.finished
            assert not request.block_ids
        self.kv.check(self.running)

    def _queued(self) -> Iterable[Request]:
        """All unfinished requests that do not run."""
        return self.waiting

    def _take_out(self, request: Request) -> None:
        """Out of the queue it stands in."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.request_id]
        self.kv.free(request)
        request.status = status

    def _admit(self) -> Request:
        """Move the head of the queue, which has its blocks, to the tail of ``running``."""
        request = self.waiting.pop()
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = request.num_computed_tokens
            if self.kv.enable_prefix_caching:
                self.stats.prefix_queries += request.num_tokens
                self.stats.prefix_hits += request.num_computed_tokens
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return request

    def _compute(self, request: Request, rows: Rows) -> int:
        """Put all that the request lacks into the plan: its prompt, or the token it decodes."""
        start = request.num_computed_tokens
        num_tokens = request.num_tokens - start
        request.num_computed_tokens = request.num_tokens
        rows.append(request, start, num_tokens)
        return num_tokens

    def _plan(
        self,
        rows: Rows,
        stop: AdmissionStop | None,
        *,
        admitted: dict[str, int],
        preempted: Iterable[Request] = (),
        padding: tuple[int, ...] = (),
        swap_out: tuple[tuple[int, int], ...] = (),
        swap_in: tuple[tuple[int, int], ...] = (),
    ) -> StepPlan:
        self._num_steps += 1
        return StepPlan(
            step=self._num_steps - 1,
            scheduled=rows,
            token_budget=self.config.max_num_batched_tokens,
            admitted_with_computed=admitted,
            preempted=tuple(request.request_id for request in preempted),
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            free_blocks=self.kv.pool.num_free,
            admission_stop=stop if self.num_waiting else None,
            padding=padding,
            swap_out=swap_out,
            swap_in=swap_in,
        )
