"""A server in virtual time, as ``loadgen.sim.virtual_client`` sees it: the seam to what simulates one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadgen.plan.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What a step put out for one request, where that is not just a token."""

    tokens: int
    finish_reason: str | None = None
    cached_tokens: int | None = None
    queue: float | None = None
    """Seconds in the engine's queue, and from there to the first token; with the last answer."""
    prefill: float | None = None


ONE_TOKEN = StepAnswer(1)


@dataclass(frozen=True, slots=True)
class Answers:
    """What a step put out: one token a request, but for ``others`` (by row); and one for each request that
    streams, of which nothing more is said."""

    request_ids: Sequence[str]
    others: Mapping[int, StepAnswer]
    joined: Sequence[str] = ()
    """Who streams from the next step on: a token in each, until it leaves."""
    left: Sequence[str] = ()
    """Who does so no more from this step on."""


ONLY_STREAMS = Answers((), {})


class VirtualServer(Protocol):
    """A simulated server. Seconds are those of its clock, which all servers of a run share."""

    @property
    def now(self) -> float:
        """The end of the step that was begun last."""

    @property
    def busy(self) -> bool: ...
    def entry(self, prompt_tokens: int) -> float:
        """Seconds from a request's sending to the server's queue."""

    def submit(self, request_id: str, token_ids: Sequence[int], planned: PlannedRequest, at: float) -> None:
        """Queue a request. Raises ValueError, in the server's words, for one that it refuses."""

    def arrival(self, end: float) -> float:
        """When what a step that ended then put out is with the client. To be asked of each step, in order."""

    def step(self) -> Answers:
        """Compute one step, up to ``now``."""

    def stream(self, before: float) -> list[float]:
        """Compute steps that begin before that moment, as long as there is nothing to say of them but that
        those who stream got their tokens. Returns their ends; may be none."""

    def abort(self, request_id: str) -> None:
        """The client has hung up."""

    def idle_until(self, moment: float) -> None: ...
