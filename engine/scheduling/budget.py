"""What one step has to give: tokens, input slots, and places for prompts that it leaves half-way."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import MAX_COUNT, EngineConfig
from engine.step import AdmissionStop, Rows


@dataclass(slots=True)
class StepBudget:
    """Two budgets: tokens that may be scheduled, and rows of the runner's input, of which a request takes
    one for each of its tokens and ``draft_slots`` more, into which a draft model appends what it drafts."""

    tokens: int
    inputs: int
    draft_slots: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> StepBudget:
        return cls(config.step_tokens, config.max_num_batched_tokens, config.draft_slots)

    @property
    def left(self) -> int:
        """The most tokens that one more request can get; 0 or less: nobody gets any."""
        return min(self.tokens, self.inputs - self.draft_slots)

    def take(self, num_tokens: int, num_requests: int = 1) -> None:
        """Spend ``num_tokens`` of ``num_requests`` together."""
        self.tokens -= num_tokens
        self.inputs -= num_tokens + num_requests * self.draft_slots

    def give_back(self, num_tokens: int) -> None:
        """Undo what one request took."""
        self.tokens += num_tokens
        self.inputs += num_tokens + self.draft_slots


@dataclass(slots=True)
class PartialPrefills:
    """How many requests a step may leave mid-prefill, and how many of these may be long.

    A request is long while it lacks more than ``threshold`` tokens. Those that run take their places first; a
    waiting request for which none is left must be computed to its end in this step, or wait.
    """

    places: int = MAX_COUNT
    long_places: int = MAX_COUNT
    threshold: int = 0

    @classmethod
    def of(cls, config: EngineConfig, scheduled: Rows) -> PartialPrefills:
        """What ``scheduled``, the share of the running requests, leaves over."""
        if config.max_num_partial_prefills is None:
            return cls()
        limits = cls(
            config.max_num_partial_prefills, config.max_long_partial_prefills, config.prefill_threshold
        )
        for item in scheduled:
            if not item.emits:
                limits.take(item.request.num_tokens - item.start)
        return limits

    def refuse(self, lacks: int) -> AdmissionStop | None:
        """Why a request that lacks so many tokens cannot be left mid-prefill; None: it can."""
        if self.places <= 0:
            return AdmissionStop.PREFILLS
        if lacks > self.threshold and self.long_places <= 0:
            return AdmissionStop.LONG_PREFILLS
        return None

    def take(self, lacks: int) -> None:
        """Give a place to a request that lacked ``lacks`` tokens before the step."""
        self.places -= 1
        self.long_places -= lacks > self.threshold
