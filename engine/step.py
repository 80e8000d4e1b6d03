"""The seam of schedulers and runners: ``schedule() -> StepPlan -> execute() -> StepResult -> update()``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.request import Request, RequestStatus

PLACEHOLDER_TOKEN_ID = -1
"""A draft nobody proposed: it pads a request that is admitted one token short. The runner must reject it."""


class AdmissionStop(Enum):
    """Why requests are still waiting after a step. The value completes "waiting, because ..."."""

    PREEMPTION = "a request was preempted in this step"
    BUDGET = "the token budget is spent"
    SEQUENCES = "max_num_seqs are running"
    CHUNKING = "the prompt exceeds the budget left and chunked prefill is off"
    PADDING = "1 + num_speculative_tokens exceed the budget left"
    BLOCKS = "too few free blocks for the whole sequence"


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What one request does in one step: compute tokens ``[start, start + num_tokens)``.

    The last ``len(drafts)`` of them are draft tokens, which are not in ``request.token_ids`` yet; they are
    all proposals or all ``PLACEHOLDER_TOKEN_ID``. The runner reads tokens, sampling parameters and the block
    table from ``request``, and changes none of them.
    """

    request: Request
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()
    emits: bool = True
    """False while the request is mid-prefill after this step: it samples nothing."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decided. ``scheduled`` is in order: running requests first, then the admitted."""

    step: int
    scheduled: tuple[ScheduledRequest, ...]
    token_budget: int
    """The budget the step began with, in tokens."""
    admitted_with_computed: dict[str, int] = field(default_factory=dict)
    """Prefix-hit tokens of each request admitted or resumed in this step."""
    preempted: tuple[str, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    free_blocks: int = 0
    """Free blocks right after scheduling (cached blocks without references count as free)."""
    admission_stop: AdmissionStop | None = None
    """Why somebody still waits; None when nobody does."""

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities for one emitted token: its own, its rank (1 = most likely), and the top k."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed. A request that emits maps to at least one token (accepted drafts + 1)."""

    tokens: dict[str, list[int]]
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafts proposed for the NEXT step."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one request after ``update``; ``finish`` is set once, on its last output."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: RequestStatus | None = None
    stop_reason: int | None = None
    """The stop token id that ended it, where one of ``stop_token_ids`` did."""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What ``update`` reports to the outside, and the counts the metrics are made of."""

    outputs: tuple[RequestOutput, ...]
    finished: tuple[Request, ...] = ()
    num_drafts: int = 0
    """Requests that verified drafts in this step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """How many requests had draft position i accepted."""
