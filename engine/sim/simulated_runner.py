"""Any workload in virtual time: the real scheduler and the real loop, over a runner that computes nothing.

``EngineCore(config, runner=SimulatedRunner(...), clock=clock)`` is an engine like any other, but its steps
take the seconds that :class:`~engine.sim.step_times.StepTimes` say, on a :class:`VirtualClock` that is
never waited for.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from engine.core import EngineCore
from engine.models.model_config import ModelConfig
from engine.request import Request, SamplingParams
from engine.sim.step_times import StepLoad, StepTimes, draw_value
from engine.step import PLACEHOLDER_TOKEN_ID, OneEach, Outputs, StepOutput, StepPlan, StepResult

TOKEN_ID = 0
"""What every request emits before its end."""
EOS_TOKEN_ID = 1
MAX_EMPTY_STEPS = 10
"""After this many steps in a row that schedule nothing, none ever will."""
Observer = Callable[[StepPlan, StepOutput, float], None]
"""Called with every step, and the seconds it took."""


class SimulationError(RuntimeError):
    """The workload can never end: nothing can be scheduled any more."""


class WorkloadClock(Protocol):
    """Calling it reads it, as ``time.monotonic`` is read. Seconds since the workload began."""

    def __call__(self) -> float: ...
    def advance_to(self, moment: float) -> None:
        """Let time pass up to a moment; one that has passed changes nothing."""


class WallClock:
    """Real time, for the same workload on a real runner."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start

    def advance_to(self, moment: float) -> None:
        time.sleep(max(moment - self(), 0.0))


class VirtualClock:
    """Time that passes in simulated steps, and where no request is there."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance_to(self, moment: float) -> None:
        self.now = max(self.now, moment)


@dataclass(frozen=True)
class ModelSize:
    """What the memory plan needs to know of a model."""

    weights_bytes: int
    kv_bytes_per_token: int
    max_model_len: int
    activation_bytes: int = 0
    """Peak bytes of a step's activations."""

    @classmethod
    def of(cls, model: ModelConfig, element_bytes: int = 2, max_num_batched_tokens: int = 0) -> ModelSize:
        """From a model's config; the activations are the widest layer's, one token of the budget each."""
        widest = 2 * model.intermediate_size + 4 * model.hidden_size
        return cls(
            weights_bytes=model.num_parameters * element_bytes,
            kv_bytes_per_token=2 * model.num_layers * model.num_kv_heads * model.head_dim * element_bytes,
            max_model_len=model.max_position_embeddings,
            activation_bytes=max_num_batched_tokens * widest * element_bytes,
        )


@dataclass(frozen=True)
class PendingStep:
    """A step that a simulated device has begun."""

    emitted: StepResult
    ready_at: float
    clock: VirtualClock

    def result(self) -> StepResult:
        """The result, once it is ready: the clock is advanced to that moment."""
        self.clock.advance_to(self.ready_at)
        return self.emitted


class SimulatedRunner:
    """Takes the time of a step and emits tokens by rule.

    A request ends by itself after ``output_lengths[request_id]`` tokens, the last of which is its
    end-of-sequence token; without an entry it goes on to its ``max_tokens``. With ``num_speculative_tokens``
    as many drafts are proposed after each step, and each is accepted with probability ``acceptance`` if those
    before it were.

    With async scheduling the host works while the device computes: see ``StepTimes.overlap``.
    """

    def __init__(
        self,
        model: ModelSize,
        times: StepTimes,
        clock: VirtualClock,
        *,
        output_lengths: Mapping[str, int] | None = None,
        num_speculative_tokens: int = 0,
        acceptance: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.weights_bytes = model.weights_bytes
        self.kv_bytes_per_token = model.kv_bytes_per_token
        self.max_model_len = model.max_model_len
        self.times, self.clock = times, clock
        self.device_seconds = 0.0
        """How long the device has computed."""
        self._activation_bytes = model.activation_bytes
        self._output_lengths = output_lengths or {}
        self._proposal = [TOKEN_ID] * num_speculative_tokens
        self._acceptance = acceptance
        self._random, self._spread = random.Random(seed), random.Random(seed)
        self._started_at = 0.0

    def profile_activation(self) -> int:
        return self._activation_bytes

    def allocate(self, num_blocks: int) -> None:
        """Nothing is held."""

    def allocate_host(self, num_blocks: int) -> None:
        """Nothing is held."""

    def execute(self, plan: StepPlan) -> StepResult:
        """A step from its planning to its result: host time, then device time."""
        load = StepLoad.of(plan)
        self.clock.now += self.times.host_seconds(load)
        return self._begin(plan, load).result()

    def decode(self, load: StepLoad) -> None:
        """A step whose tokens are not used."""
        self.clock.now += self.times.host_seconds(load)
        self.clock.advance_to(self._occupy(load))

    def start(self, plan: StepPlan) -> PendingStep:
        """A step whose planning began when the step before it was started. What of the host's time overlaps
        with that one has passed since, or is waited for; the rest is spent now."""
        load = StepLoad.of(plan)
        host = self.times.host_seconds(load)
        planned = host * self.times.overlap
        self.clock.advance_to(self._started_at + planned)
        self.clock.now += host - planned
        return self._begin(plan, load)

    def _begin(self, plan: StepPlan, load: StepLoad) -> PendingStep:
        for transfer in plan.transfers.loads if plan.transfers is not None else ():
            transfer.finish()
        return PendingStep(self._emit(plan), self._occupy(load), self.clock)

    def _occupy(self, load: StepLoad) -> float:
        """The device begins a step now. Returns the time at which it ends."""
        seconds = self.times.device_seconds(load)
        if factor := draw_value(self.times.spread, seconds, self._spread):
            seconds *= factor
        self.device_seconds += seconds
        self._started_at = self.clock.now
        return self.clock.now + seconds

    def _emit(self, plan: StepPlan) -> StepResult:
        rows = plan.rows
        if not self._proposal and not rows.drafts:
            emitting = rows.emitting
            tokens = [TOKEN_ID] * len(emitting)
            if self._output_lengths:
                tokens = [
                    self._token(item.request, item.start + item.num_tokens) for item in rows if item.emits
                ]
            return StepResult(OneEach(emitting, tokens))
        emitted: dict[str, list[int]] = {}
        for item in rows:
            if item.emits:
                end = item.start + item.num_tokens - len(item.drafts)
                count = 1 + self._accepted(item.drafts)
                emitted[item.request.request_id] = [self._token(item.request, end + i) for i in range(count)]
        return StepResult(emitted, dict.fromkeys(emitted, self._proposal))

    def _token(self, request: Request, position: int) -> int:
        """The token at a position of the sequence."""
        length = self._output_lengths.get(request.request_id)
        ends = length is not None and position - request.num_prompt_tokens + 1 >= length
        return EOS_TOKEN_ID if ends else TOKEN_ID

    def _accepted(self, drafts: Sequence[int]) -> int:
        count = 0
        for draft in drafts:
            if draft == PLACEHOLDER_TOKEN_ID or self._random.random() >= self._acceptance:
                break
            count += 1
        return count


@dataclass(frozen=True)
class TimedRequest:
    """One request of a workload. ``prompt_token_ids`` may be a range, which takes no memory."""

    request_id: str
    arrival: float
    """Seconds on the clock of the run."""
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0

    def make(self) -> Request:
        return Request(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt_token_ids),
            sampling=self.sampling,
            eos_token_ids=(EOS_TOKEN_ID,),
            priority=self.priority,
            arrival_time=self.arrival,
        )


def own_prompt(place: int, length: int) -> range:
    """A prompt that shares no token with that of another ``place``."""
    first = 2 + place * 10_000_000
    return range(first, first + length)


@dataclass(slots=True)
class RequestTimeline:
    """What a client would have stamped, in seconds on the clock of the run."""

    request: Request
    stamps: list[float] = field(default_factory=list)
    """When its outputs came."""
    counts: dict[int, int] = field(default_factory=dict)
    """Number of tokens of an output, by its place in ``stamps``, where it is not 1."""

    @property
    def finished(self) -> float:
        return self.stamps[-1]

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.request.arrival_time

    @property
    def e2e(self) -> float:
        return self.stamps[-1] - self.request.arrival_time

    @property
    def itl(self) -> list[float]:
        """Gaps between tokens: n tokens that come together make n gaps of 1/n of the time since the last."""
        gaps: list[float] = []
        for place, (before, stamp) in enumerate(pairwise(self.stamps), start=1):
            count = self.counts.get(place, 1)
            gaps += [(stamp - before) / count] * count
        return gaps


def run_workload(
    core: EngineCore,
    clock: WorkloadClock,
    requests: Iterable[TimedRequest],
    observe: Observer | None = None,
) -> list[RequestTimeline]:
    """Run the requests until all have ended. Timelines in the order of ``requests``.

    ``core`` was made with this ``clock``. On a :class:`VirtualClock`, which its :class:`SimulatedRunner` must
    share, idle time is jumped over. Raises SimulationError when nothing can ever happen again, ValueError
    for a request that the scheduler refuses.
    """
    given = list(requests)
    coming = deque(sorted(given, key=lambda request: request.arrival))
    timelines: dict[str, RequestTimeline] = {}
    empty_steps = 0
    while coming or core.has_unfinished:
        if not core.has_unfinished:
            clock.advance_to(coming[0].arrival)
        began = clock()
        while coming and coming[0].arrival <= began:
            request = coming.popleft().make()
            core.add(request)
            timelines[request.request_id] = RequestTimeline(request)
        plan, output = core.step()
        now = clock()
        _stamp(timelines, Outputs.of(output.outputs), now)
        if observe is not None:
            observe(plan, output, now - began)
        empty_steps = 0 if plan.scheduled or plan.preempted or output.outputs else empty_steps + 1
        if empty_steps > MAX_EMPTY_STEPS:
            raise SimulationError(f"nothing was scheduled in {MAX_EMPTY_STEPS} steps, at {now:.3f} s")
    return [timelines[request.request_id] for request in given]


def _stamp(timelines: dict[str, RequestTimeline], outputs: Outputs, now: float) -> None:
    for request_id in outputs.request_ids:
        timelines[request_id].stamps.append(now)
    for output in outputs.others.values():
        if (count := len(output.token_ids)) != 1:
            timeline = timelines[output.request_id]
            timeline.counts[len(timeline.stamps) - 1] = count
