"""The interface between the runner and the proposers of drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.request import Request
from engine.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What the target model has just computed, before the scheduler has booked it."""

    scheduled: Sequence[ScheduledRequest]
    tables: Sequence[list[int]]
    """The block table of each, as it was when the step began; to be read only. The request itself may have
    been preempted since, while the step was computed. Another admission means another list."""
    tokens: Mapping[str, list[int]]
    """What each request emitted; requests that are mid-prefill are absent."""
    hidden: torch.Tensor
    """The residual stream after the target's last layer, [T, hidden], in the order of ``scheduled``. Of a
    request that rejected drafts, only the rows before them count."""
    drafting: bool = True
    """False where no drafts are wanted: what the proposer keeps is brought up to date all the same."""

    def emitting(self) -> Iterator[tuple[Request, list[int]]]:
        """Each request that emitted, and the tokens, which are not in ``token_ids`` yet."""
        for item in self.scheduled:
            if emitted := self.tokens.get(item.request.request_id):
                yield item.request, emitted


class Proposer(ABC):
    """Proposes the drafts that the next step verifies. Wrong ones cost time and change no output.

    ``propose`` is called once after every step of the target, in order, for everything that was scheduled.
    A proposer with KV of its own keeps it in the target's blocks: same block tables, same slots.
    """

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0

    def activation_bytes(self) -> int:
        """Peak bytes of one ``propose``, and of what is kept from one to the next."""
        return 0

    def allocate(self, num_blocks: int) -> None:  # noqa: B027 - most have no cache
        """Make the KV cache, ``num_blocks`` blocks of the target's size."""

    @abstractmethod
    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        """Drafts of requests that emitted: ``num_speculative_tokens`` at most, none past max_model_len."""

    def probabilities(self, request_id: str) -> torch.Tensor | None:
        """The distributions [drafts, vocab] that this request's last drafts were drawn from.

        None where each draft was the only candidate: its distribution has all weight on it.
        """
        return None
