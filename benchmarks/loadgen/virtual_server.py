"""The real scheduler and vLLM's metrics on a virtual clock: recordings of servers that never ran.

Step times are a model: a fixed cost, a cost a token, and a cost for every token attended to. :data:`CPU` is
fitted to recordings of a real vLLM (SmolLM2-135M on one CPU core). A minute of load takes a fraction of a
second.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.metrics.prometheus import PrometheusMetrics
from engine.request import Request, SamplingParams
from engine.speculative_config import SpeculativeConfig
from engine.step import StepPlan, StepResult

CONTEXT = 4096
START_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Pace:
    """What a step takes, in seconds, and the KV pool of such a machine in blocks of ``block`` tokens."""

    fixed: float
    per_token: float
    per_pair: float
    decode_token: float
    decode_pair: float
    block: int
    blocks: int

    def times(self, factor: float) -> Pace:
        """A machine whose steps take ``factor`` times as long."""
        return replace(
            self,
            fixed=factor * self.fixed,
            per_token=factor * self.per_token,
            per_pair=factor * self.per_pair,
            decode_token=factor * self.decode_token,
            decode_pair=factor * self.decode_pair,
        )


CPU = Pace(0.026, 0.0012, 0.81e-6, 0.0010, 3.3e-6, block=128, blocks=728)
GPU = Pace(0.0075, 30e-6, 2e-9, 25e-6, 12e-9, block=16, blocks=4000)
"""Of the size of an 8B model on a card with 24 GB; not measured."""


@dataclass(frozen=True)
class Job:
    """One request. ``shared`` prompt tokens after ``header`` own ones are the same in all prompts."""

    prompt: int
    output: int
    header: int = 0
    shared: int = 0
    patience: int | None = None
    """Tokens after which the client closes the connection, on average."""


class _Runner:
    """Takes the time of a real step, and emits random tokens; a draft's tokens are accepted by chance."""

    weights_bytes = 1 << 20
    kv_bytes_per_token = 1 << 10
    max_model_len = CONTEXT

    def __init__(self, server: VirtualServer, drafts: int, acceptance: float) -> None:
        self.server, self.drafts, self.acceptance = server, drafts, acceptance

    def profile_activation(self) -> int:
        return 0

    def allocate(self, num_blocks: int) -> None:
        pass

    def allocate_host(self, num_blocks: int) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        chance, pace = self.server.chance, self.server.pace
        seconds = pace.fixed
        tokens: dict[str, list[int]] = {}
        for item in plan.scheduled:
            pairs = item.num_tokens * (item.start + item.num_tokens / 2)
            decodes = item.num_tokens <= 1 + self.drafts
            seconds += item.num_tokens * (pace.decode_token if item.num_tokens == 1 else pace.per_token)
            seconds += pairs * (pace.decode_pair if decodes else pace.per_pair)
            if item.emits:
                accepted = 0
                while accepted < len(item.drafts) and chance.random() < self.acceptance:
                    accepted += 1
                tokens[item.request.request_id] = [chance.randrange(1000) for _ in range(accepted + 1)]
        self.server.clock += seconds * chance.uniform(0.93, 1.07)
        return StepResult(tokens, {name: [7] * self.drafts for name in tokens} if self.drafts else {})


class VirtualServer:
    """A server with these flags, its clients, and whoever scrapes it."""

    def __init__(
        self,
        seed: int = 0,
        acceptance: float = 0.0,
        pace: Pace = CPU,
        scrape_every: float = 2.0,
        **flags: Any,
    ) -> None:
        self.chance, self.clock, self.now = Random(seed), 0.0, 0.0
        self.pace, self.scrape_every = pace, scrape_every
        self.flags = dict(flags)
        drafts = flags.pop("num_speculative_tokens", 0)
        speculative = SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None
        if self.flags.pop("num_speculative_tokens", None):
            self.flags["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts}
        blocks = flags.pop("num_gpu_blocks_override", pace.blocks)
        config = EngineConfig(
            max_model_len=CONTEXT,
            block_size=pace.block,
            num_gpu_blocks_override=blocks,
            speculative_config=speculative,
            device_memory=1 << 34,
            **flags,
        )
        self.core = EngineCore(config, _Runner(self, drafts, acceptance), lambda: self.clock)
        cache = {
            "block_size": pace.block,
            "num_gpu_blocks": blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
        }
        self.metrics = PrometheusMetrics(
            "m", max_model_len=CONTEXT, num_speculative_tokens=drafts, cache_info=cache
        )
        self.scrapes: list[tuple[int, str]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._alive: dict[str, tuple[Job, Callable[[], None] | None]] = {}
        self._uncounted: Counter[str] = Counter()
        self._common = [self.chance.randrange(1000) for _ in range(CONTEXT)]

    def poisson(self, rate: float, job: Callable[[], Job], seconds: float) -> None:
        """Requests that come whether or not the last one is answered."""
        at = self.chance.expovariate(rate)
        while at < seconds:
            self._at(at, lambda: self._submit(job()))
            at += self.chance.expovariate(rate)

    def closed(self, clients: int, job: Callable[[], Job], total: int) -> None:
        """Clients that each ask again when they are answered."""
        left = itertools.count(total, -1)

        def ask() -> None:
            if next(left) > 0:
                self._submit(job(), then=lambda: self._at(self.now + 0.004, ask))

        for _ in range(clients):
            self._at(0.0, ask)

    def every(self, period: float, job: Callable[[], Job], seconds: float) -> None:
        for number in range(int(seconds / period)):
            self._at(2.0 + number * period, lambda: self._submit(job()))

    def run(self, seconds: float | None = None) -> list[tuple[int, str]]:
        """Scrapes until the work is done, or until ``seconds``. As in vLLM, gauges change at a step's end."""
        until = float("inf") if seconds is None else seconds
        while self.clock < until and (self._events or self.core.has_unfinished):
            while self._events and self._events[0][0] <= self.clock:
                self.now, _, event = heapq.heappop(self._events)
                event()
            if self.core.has_unfinished:
                self._step()
            elif self._events:
                self._scrape_before(min(self._events[0][0], until))
                self.clock = min(self._events[0][0], until)
        self._scrape_before(self.clock + 2 * self.scrape_every)
        return self.scrapes

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _submit(self, job: Job, then: Callable[[], None] | None = None) -> None:
        name = str(next(self._order))
        own = [self.chance.randrange(1000) for _ in range(job.prompt - job.shared)]
        prompt = own[: job.header] + self._common[: job.shared] + own[job.header :]
        sampling = SamplingParams(max_tokens=job.output, ignore_eos=True)
        self._alive[name] = job, then
        self.core.add(Request(name, prompt, sampling, arrival_time=self.now))

    def _step(self) -> None:
        plan, output = self.core.step()
        self.now = self.clock
        self._scrape_before(self.clock)
        # vLLM counts a preemption when its victim emits again.
        self._uncounted.update(plan.preempted)
        late = sum(self._uncounted.pop(item.request_id, 0) for item in output.outputs)
        self.metrics.record(replace(self.core.stats, preemptions=late))
        for item in output.outputs:
            job, then = self._alive[item.request_id]
            hung_up = job.patience is not None and self.chance.random() < 1 / job.patience
            if item.finish is None and not hung_up:
                continue
            del self._alive[item.request_id]
            if item.finish is None:
                self.core.abort([item.request_id])
                self.metrics.record(self.core.stats)
            if then is not None:
                then()

    def _scrape_before(self, time: float) -> None:
        while (due := len(self.scrapes) * self.scrape_every) < time:
            self.scrapes.append((START_MS + round(due * 1000), self.metrics.render().decode()))
