"""What one step can spend: tokens, input slots, and places for prompts that it leaves half computed."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import MAX_COUNT, EngineConfig
from engine.step import AdmissionStop, Rows


@dataclass(slots=True)
class StepBudget:
    """Two budgets: tokens to schedule, and rows of the runner's input. A request takes one row per token, and
    ``draft_slots`` more for what a draft model appends."""

    tokens: int
    inputs: int
    draft_slots: int = 0

    @classmethod
    def of(cls, config: EngineConfig) -> StepBudget:
        return cls(config.step_tokens, config.max_num_batched_tokens, config.draft_slots)

    @property
    def left(self) -> int:
        """The most tokens that one more request can get; 0 or less: none."""
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

    A request is long while it lacks more than ``threshold`` tokens. Running requests take their places first.
    A waiting request that finds no place left must be computed to its end in this step, or wait.
    """

    places: int = MAX_COUNT
    long_places: int = MAX_COUNT
    threshold: int = 0

    @classmethod
    def of(cls, config: EngineConfig, scheduled: Rows) -> PartialPrefills:
        """What remains beside ``scheduled``, the rows of the running requests."""
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
        """Why a request that lacks that many tokens cannot be left mid-prefill; None: it can."""
        if self.places <= 0:
            return AdmissionStop.PREFILLS
        if lacks > self.threshold and self.long_places <= 0:
            return AdmissionStop.LONG_PREFILLS
        return None

    def take(self, lacks: int) -> None:
        """Give a place to a request that lacked ``lacks`` tokens before the step."""
        self.places -= 1
        self.long_places -= lacks > self.threshold
