"""The engine: a scheduler, a runner, and the step that joins them. No HTTP, text or processes here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from engine.baselines.static import StaticBatchScheduler
from engine.baselines.two_track import TwoTrackScheduler
from engine.config import GIB, EngineConfig
from engine.kv.kv_cache import KVCacheManager, MemoryPlan, plan_memory
from engine.metrics.stats import SchedulerStats, StepObserver, StepStats
from engine.request import Request, RequestStatus
from engine.scheduling.scheduler import UnifiedScheduler
from engine.scheduling.waiting import WaitingQueue
from engine.step import AdmissionStop, RequestOutput, StepOutput, StepPlan, StepResult
from engine.structured.grammars import Compiler, Grammars, LLGuidance

GATE_SECONDS = 0.001
"""How long to sleep when all requests wait for other threads."""


class Runner(Protocol):
    """Computes the steps: the model, a simulation of it, or a fake."""

    weights_bytes: int
    kv_bytes_per_token: int

    @property
    def max_model_len(self) -> int:
        """The longest context the model was made for; the default of ``--max-model-len``."""

    def profile_activation(self) -> int:
        """Peak bytes of activations in a step of ``max_num_batched_tokens``."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache."""

    def allocate_host(self, num_blocks: int) -> None:
        """Make room in host memory: called where ``--preemption-mode swap`` or offloading needs it."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Copy the blocks that the plan swaps, then compute the step."""


class Pending(Protocol):
    """A step that a runner has begun."""

    def result(self) -> StepResult:
        """Wait for its end."""


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """A runner that computes while the scheduler plans, as ``--async-scheduling`` needs it."""

    def start(self, plan: StepPlan) -> Pending:
        """Begin a step and return at once. The step before it has ended, and is booked: what the plan says of
        tokens, drafts and starts is exact. After the return the scheduler may change block tables, counts and
        statuses of the plan's requests, so they must have been read. Until :meth:`Pending.result` it does not
        change their tokens."""


class _InFlight(NamedTuple):
    """A step that is being computed."""

    started_at: float
    """When its planning began."""
    plan: StepPlan
    pending: Pending


class Scheduler(Protocol):
    """Decides the steps: the unified scheduler, or one of ``engine/baselines``.

    ``schedule()`` plans a step and books it at once, ``update(plan, result)`` takes in what came of it.
    Runners execute plans in the order in which they were made.
    """

    kv: KVCacheManager
    running: list[Request]
    """In order of admission."""
    waiting: WaitingQueue
    stats: SchedulerStats
    """Counts since the start."""

    @property
    def has_unfinished(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int:
        """All unfinished requests that do not run."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0..1."""

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError for one that could never finish, or an id in use."""

    def abort(self, request_ids: Iterable[str]) -> list[Request]:
        """Drop requests and free their blocks at once. Returns those that were unfinished, each only once."""

    def schedule(self) -> StepPlan:
        """Decide the next step."""

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append what the step emitted, and finish the requests that have ended. Requests aborted meanwhile
        are ignored."""

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, and on demand what the KV connector has; False, and nothing happens, while
        any request holds a block."""

    def check(self) -> None:
        """Assert every invariant. Slow: for tests."""


def make_scheduler(config: EngineConfig, num_blocks: int, num_host_blocks: int = 0) -> Scheduler:
    """The scheduler of ``config.scheduler``. ``num_blocks``: of the device, null block included;
    ``num_host_blocks``: of the swap space, where it is used."""
    if config.scheduler == "static":
        return StaticBatchScheduler(config, num_blocks)
    if config.scheduler == "two-track":
        return TwoTrackScheduler(config, num_blocks, num_host_blocks)
    return UnifiedScheduler(config, num_blocks, num_host_blocks)


class EngineCore:
    """Requests in, steps out. Not thread-safe: one loop owns it.

    ``runner=None`` loads ``config.model``; ``clock`` is the one that stamps ``Request.arrival_time``;
    ``compiler`` makes grammars, the model's own by default; ``schedulers`` makes the scheduler.
    Raises ConfigError when a flag breaks a rule, or the memory plan does not hold one full-length request.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | None = None,
        clock: Callable[[], float] = time.monotonic,
        compiler: Compiler | None = None,
        schedulers: Callable[[EngineConfig, int, int], Scheduler] = make_scheduler,
    ) -> None:
        config.validate()
        if runner is None:
            from engine.runner import ModelRunner  # torch: only where a model is computed

            runner = ModelRunner(config)
            config = runner.config  # with what its device has
        self.config = config.resolved(runner.max_model_len)
        self.config.validate()
        self.runner = runner
        self.memory_plan: MemoryPlan = plan_memory(
            self.config,
            weights_bytes=runner.weights_bytes,
            activation_bytes=runner.profile_activation(),
            kv_bytes_per_token=runner.kv_bytes_per_token,
        )
        runner.allocate(self.memory_plan.num_blocks)
        num_host_blocks = self._num_host_blocks()
        if num_host_blocks:
            runner.allocate_host(num_host_blocks)
        self.scheduler = schedulers(self.config, self.memory_plan.num_blocks, num_host_blocks)
        self.grammars = Grammars(compiler or LLGuidance(self.config))
        self.clock = clock
        self.metrics = StepObserver(self.scheduler, clock, self.config.enable_lora)
        self.stats = StepStats()
        """What the last step, or the last abort, adds to the metrics."""
        self._in_flight: _InFlight | None = None

    def _num_host_blocks(self) -> int:
        """Blocks of the swap space, at most what ``max_num_seqs`` requests would fill; 0 without swapping."""
        config, plan = self.config, self.memory_plan
        block_bytes = self.runner.kv_bytes_per_token * config.block_size
        if config.kv_offloading_size is not None:
            return max(int(config.kv_offloading_size * GIB) // block_bytes, 1)
        if config.preemption_mode != "swap":
            return 0
        room = int(config.swap_space * GIB) // block_bytes
        return min(room, config.max_num_seqs * -(-plan.max_model_len // config.block_size))

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or self._in_flight is not None

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError as the scheduler does."""
        if request.sampling.structured_outputs is not None:
            self.grammars.start(request)
        self.scheduler.add(request)
        self.metrics.queued(request)

    def abort(
        self, request_ids: Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED
    ) -> None:
        """Drop requests and free their blocks at once; unknown ids are ignored.

        ``status`` is how the metrics count them: as aborted, or as finished by something the engine
        cannot see, such as a stop string.
        """
        self.stats = self.metrics.finished_outside(self.scheduler.abort(request_ids), status)

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Forget cached prefixes, and on demand what the KV connector has; False, and nothing happens, while
        any request holds a block."""
        return self.scheduler.reset_prefix_cache(reset_connector)

    def step(self) -> tuple[StepPlan, StepOutput]:
        """Plan, compute, book, observe. With async scheduling the step booked here was planned in the call
        before, and computes while the next one is planned."""
        if self.config.async_scheduling:
            started_at, plan, output = self._step_ahead()
        else:
            started_at = self.clock()
            plan = self.scheduler.schedule()
            result = self.runner.execute(plan)
            output = self._update(plan, result)
        self.stats = self.metrics.observe(plan, output, started_at)
        if not plan.scheduled and plan.admission_stop is AdmissionStop.GATE:
            time.sleep(GATE_SECONDS)
        return plan, output

    def _step_ahead(self) -> tuple[float, StepPlan, StepOutput]:
        scheduler, runner = self.scheduler, self.runner
        assert isinstance(scheduler, UnifiedScheduler)
        assert isinstance(runner, AsyncRunner), "this runner cannot compute while the scheduler plans"
        if self._in_flight is None:
            started_at, plan = self.clock(), scheduler.schedule()
            self._in_flight = _InFlight(started_at, plan, runner.start(plan))
        started_at, plan, pending = self._in_flight
        next_started_at, upcoming = self.clock(), scheduler.schedule()
        output = self._update(plan, pending.result())
        upcoming = scheduler.reconcile(upcoming)
        self._in_flight = None
        if upcoming.scheduled or upcoming.failed or upcoming.transfers or scheduler.has_unfinished:
            self._in_flight = _InFlight(next_started_at, upcoming, runner.start(upcoming))
        return started_at, plan, output

    def _update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        stuck = self._abort_stuck()
        output = self.scheduler.update(plan, result)
        if stuck:
            refused = map(RequestOutput.refused, stuck)
            output = replace(output, outputs=(*output.outputs, *refused), finished=(*output.finished, *stuck))
        return output

    def _abort_stuck(self) -> list[Request]:
        """End requests whose output can no longer match its grammar, before this step's tokens are booked."""
        stuck = self.grammars.stuck()
        self.scheduler.abort(request.request_id for request in stuck)
        for request in stuck:
            request.status = RequestStatus.FINISHED_ERROR
        return stuck
