"""How much of what was computed was of use, and how many sequence slots were idle."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.step import StepOutput, StepPlan


@dataclass
class Occupancy:
    """Observes every step of one engine: see :attr:`utilisation` and :attr:`bubble_share`."""

    max_num_seqs: int
    computed_slots: int = 0
    """Token slots that went through the model, padding included."""
    useful_slots: int = 0
    """Those of them that brought a request further than it had ever been."""
    wanted_seconds: float = 0.0
    """Wanted sequence slots times seconds. Wanted: one per unfinished request, at most ``max_num_seqs``."""
    bubble_seconds: float = 0.0
    """Those of them that computed nothing in the step: padded, paused, or not filled."""
    moved_blocks: int = 0
    _reached: dict[str, int] = field(default_factory=dict)

    def observe(self, plan: StepPlan, output: StepOutput, seconds: float) -> None:
        """A step that has ended, and how long it took."""
        rows = plan.rows
        self.computed_slots += sum(rows.counts) + sum(plan.padding)
        self.moved_blocks += len(plan.swap_out) + len(plan.swap_in)
        for request, start, count in zip(rows.requests, rows.starts, rows.counts, strict=True):
            reached = self._reached.get(request.request_id, start)
            now = min(request.num_computed_tokens, start + count)  # without what was rejected of drafts
            if now > reached:
                self.useful_slots += now - reached
                self._reached[request.request_id] = now
        wanted = min(self.max_num_seqs, plan.num_running + plan.num_waiting)
        self.wanted_seconds += wanted * seconds
        self.bubble_seconds += max(wanted - len(rows), 0) * seconds

    @property
    def utilisation(self) -> float:
        """Share of the computed token slots that were of use: no padding, nothing computed before."""
        return self.useful_slots / self.computed_slots if self.computed_slots else 0.0

    @property
    def bubble_share(self) -> float:
        """Share of the wanted sequence slots, over time, in which no request was served."""
        return self.bubble_seconds / self.wanted_seconds if self.wanted_seconds else 0.0
