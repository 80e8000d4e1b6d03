"""Prompts and conversations as recorded, and the schedule that sends them.

The turns of a conversation are sent one after another, ``think`` seconds after the answer before has ended.
Each brings the history as it was recorded, so that what is sent does not depend on what the server said, and
one seed is one load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadgen.plan.arrivals import Arrival
from loadgen.plan.workload import (
    Message,
    PlannedRequest,
    Schedule,
    WorkloadError,
    mode_of,
    schedule_hash,
    warm,
)

CHARS_PER_TOKEN = 4
"""English text, most tokenisers. A guess, for text that comes without its number of tokens."""


class DatasetError(WorkloadError):
    """A file of prompts cannot be read; the message says where, what and the fix."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: everything said before it, and how many tokens are to be answered."""

    messages: tuple[Message, ...] | None
    prompt: str | None
    output_tokens: int
    sampling: tuple[tuple[str, Any], ...] = ()
    """Further fields of the request's body, e.g. temperature or tools."""


@dataclass(frozen=True)
class Dataset:
    """Conversations; a lone prompt is one of one turn."""

    name: str
    conversations: tuple[tuple[Turn, ...], ...]
    guessed: bool = False
    """Lengths of answers were guessed from their characters."""
    notes: tuple[str, ...] = ()
    """What was left out, and what the lengths are, for the report."""

    def schedule(
        self,
        *,
        seed: int,
        arrival: Arrival,
        num_requests: int | None = None,
        duration: float | None = None,
        max_concurrency: int | None = None,
        output_len: int | None = None,
        think: float = 0.0,
        natural_stop: bool = False,
        shuffle: bool = True,
    ) -> Schedule:
        """``num_requests`` conversations (all of them by default) that begin as ``arrival`` says.

        Drawn without replacement; when all were used, anew. ``output_len`` replaces the recorded lengths.
        ``think`` is the mean pause in seconds before a further turn, exponentially distributed.
        ``natural_stop`` lets the model end an answer early. Raises DatasetError, ArrivalError.
        """
        if not (math.isfinite(think) and think >= 0):
            raise DatasetError(f"a think time of {think} s: it must not be negative")
        order_rng, times_rng, think_rng = np.random.default_rng(seed).spawn(3)
        if num_requests is None and (duration is None or arrival.concurrency is not None):
            num_requests = len(self.conversations)
        times = arrival.times(times_rng, num_requests=num_requests, duration=duration)
        if len(times) == 0:
            raise DatasetError(
                f"{arrival.description} for {duration:g} s gives no request; raise one of them"
            )
        requests: list[PlannedRequest] = []
        for begin, which in zip(times, self._order(len(times), order_rng, shuffle), strict=True):
            for place, turn in enumerate(self.conversations[which]):
                requests.append(
                    PlannedRequest(
                        index=len(requests),
                        cls="first turn" if place == 0 else "later turns",
                        intended=float(begin),
                        prompt_token_ids=None,
                        prompt=turn.prompt,
                        max_tokens=output_len or turn.output_tokens,
                        ignore_eos=not natural_stop,
                        messages=turn.messages,
                        sampling=turn.sampling,
                        follows=len(requests) - 1 if place else None,
                        think=float(think_rng.exponential(think)) if place and think else 0.0,
                    )
                )
        mode, cap = mode_of(arrival, max_concurrency)
        return Schedule(
            requests=tuple(requests),
            warmup=(warm(replace(requests[0], index=-1)),),
            mode=mode,
            concurrency=cap,
            duration=duration,
            sha256=schedule_hash(requests, mode, cap, duration),
            description=f"{self.name}: {len(times)} conversations, {len(requests)} requests"
            + (f", think time {think:g} s" if think else "")
            + (
                f", answers guessed at {CHARS_PER_TOKEN} characters per token"
                * (self.guessed and not output_len)
            )
            + "".join(f"; {note}" for note in self.notes)
            + f"; {arrival.description}; seed {seed}",
            seed=seed,
        )

    def _order(self, count: int, rng: np.random.Generator, shuffle: bool) -> Iterator[int]:
        size = len(self.conversations)
        for start in range(0, count, size):
            once = rng.permutation(size) if shuffle else range(size)
            yield from (int(i) for i in once[: count - start])
