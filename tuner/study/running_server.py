"""What a server that is not ours gets sent: a small load, stated beforehand, or the one that is asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from loadgen.plan.workload import REFERENCE_CONTEXT, Schedule, preset
from loadgen.plan.workload_file import is_file
from tuner.job.job import DEFAULT_RUN_SECONDS
from tuner.runs.load import Traffic, load_seconds
from tuner.study.budget import format_seconds

SMALL_CONCURRENCY = 2
SMALL_REQUESTS = 100
"""Of a closed loop of SMALL_CONCURRENCY and DEFAULT_RUN_SECONDS, at most; longer and wider ones have so many
more."""
SMALL_PROMPT, SMALL_OUTPUT = 4096, 1024
"""Tokens of the longest request of a small load."""


def most_requests(concurrency: int, seconds: float) -> int:
    """Of a closed loop, however fast the server is."""
    share = concurrency / SMALL_CONCURRENCY * max(1.0, seconds / DEFAULT_RUN_SECONDS)
    return math.ceil(SMALL_REQUESTS * share)


def small_scale(workload: str, max_model_len: int) -> float:
    """The factor at which the prompts of a preset fit the context and SMALL_PROMPT; a workload of the user's
    own is taken as it stands: 1.
    """
    if is_file(workload):
        return 1.0
    longest = max(cls.prompt.high for cls in preset(workload, max_model_len=REFERENCE_CONTEXT).classes)
    return min(1.0, max_model_len / REFERENCE_CONTEXT, SMALL_PROMPT / longest)


@dataclass(frozen=True)
class StatedLoad:
    """What will be sent, at most."""

    requests: int
    """With the first one, of two tokens, and those of the warm-up."""
    concurrency: int | None
    """Requests in flight at most; None: as many as have come and are not answered."""
    seconds: float
    prompt_tokens: float
    """On average."""
    output_tokens: float
    longest_prompt: int
    longest_output: int

    @classmethod
    def of(cls, load: Traffic) -> Self:
        schedules: tuple[Schedule, ...] = load.rungs()
        sent = [r for schedule in schedules for r in (*schedule.warmup, *schedule.requests)]
        prompts = [len(r.prompt_token_ids or ()) for r in sent]
        outputs = [r.max_tokens for r in sent]
        return cls(
            requests=1 + len(sent),
            concurrency=schedules[0].concurrency,
            seconds=sum(map(load_seconds, schedules)),
            prompt_tokens=fmean(prompts),
            output_tokens=fmean(outputs),
            longest_prompt=max(prompts),
            longest_output=max(outputs),
        )

    @property
    def small(self) -> bool:
        """Whether it is sent without asking. One without a bound on what is in flight never is."""
        return (
            self.concurrency is not None
            and self.concurrency <= SMALL_CONCURRENCY
            and self.seconds <= DEFAULT_RUN_SECONDS + 1e-6
            and self.longest_prompt <= SMALL_PROMPT
            and self.longest_output <= SMALL_OUTPUT
        )

    def __str__(self) -> str:
        each = f"{self.concurrency} at a time, " if self.concurrency is not None else "as they come, "
        up_to = "up to " if self.concurrency is not None else "about "
        return (
            f"{up_to}{self.requests} requests, {each}of about {self.prompt_tokens:.0f} prompt and "
            f"{self.output_tokens:.0f} output tokens, over {format_seconds(self.seconds)}"
        )
