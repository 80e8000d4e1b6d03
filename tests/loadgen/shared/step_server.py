"""A server in virtual time that answers each request with one token per step of fixed length."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.plan.workload import PlannedRequest
from loadgen.sim.virtual_server import Answers, StepAnswer

STEP = 0.1
"""Seconds."""
ROOM = 1000
"""Tokens of the longest prompt that is not refused."""


class StepServer:
    """``delay``: seconds to the queue; ``late``: seconds from a step's end to the client."""

    def __init__(self, delay: float = 0.0, late: float = 0.0) -> None:
        self.now = 0.0
        self.delay, self.late = delay, late
        self.left: dict[str, int] = {}
        self.served: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def entry(self, prompt_tokens: int) -> float:
        return self.delay

    def submit(self, request_id: str, token_ids: Sequence[int], planned: PlannedRequest, at: float) -> None:
        if len(token_ids) > ROOM:
            raise ValueError(f"{len(token_ids)} tokens are too many")
        if not self.left:
            self.now = max(self.now, at)
        self.left[request_id] = planned.max_tokens
        self.served.append(request_id)

    def step(self) -> Answers:
        self.now += STEP
        ids = list(self.left)
        others = {}
        for row, name in enumerate(ids):
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
                others[row] = StepAnswer(1, "length", cached_tokens=0, queue=0.0, prefill=STEP)
        return Answers(ids, others)

    def stream(self, before: float) -> list[float]:
        return []

    def arrival(self, end: float) -> float:
        return end + self.late

    def abort(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def idle_until(self, moment: float) -> None:
        self.now = max(self.now, moment)
