"""The seam of schedulers and runners: ``schedule() -> StepPlan -> execute() -> StepResult -> update()``.

With a thousand requests, one object for each in every step costs more than to decide what they do. So the
three collections that cross the seam may be columns: :class:`Rows`, :class:`OneEach` and :class:`Outputs` are
an ordinary sequence, mapping and sequence; each item is made when it is read. Code that must be fast reads
the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, overload

from engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from engine.kv.kv_transfer import KVTransfers

PLACEHOLDER_TOKEN_ID = -1
"""Stands in for a draft that was not proposed, beside a request that is admitted one token short of its end.
The runner must reject it."""


class AdmissionStop(Enum):
    """Why requests are still waiting after a step. The value completes "waiting, because ..."."""

    PREEMPTION = "a request was preempted in this step"
    BUDGET = "the token budget is spent"
    SEQUENCES = "max_num_seqs are running"
    CHUNKING = "the prompt exceeds the budget left and chunked prefill is off"
    PADDING = "1 + num_speculative_tokens exceed the budget left"
    BLOCKS = "too few free blocks for the whole sequence"
    PREFILLS = "max_num_partial_prefills are mid-prefill"
    LONG_PREFILLS = "max_long_partial_prefills long ones are mid-prefill"
    ADAPTERS = "max_loras adapters are in the step, and not its own"
    GATE = "its grammar or its KV is not there yet"
    BATCH = "the batch runs until its last member ends"
    SWAPPED = "requests swapped out to host memory come first"


class ScheduledRequest(NamedTuple):
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


@dataclass(slots=True, eq=False)
class Rows(Sequence[ScheduledRequest]):
    """Scheduled requests as columns: row i of each belongs to one request. Rare properties are sparse."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """``num_tokens`` of each."""
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By request id, for those that have drafts."""
    silent: set[str] = field(default_factory=set)
    """Ids of the requests that emit nothing, as they are mid-prefill after this step."""

    @classmethod
    def of(cls, items: Iterable[ScheduledRequest]) -> Rows:
        """The columns of ``items``; of a Rows, itself."""
        if isinstance(items, Rows):
            return items
        rows = cls()
        for item in items:
            rows.append(*item)
        return rows

    def append(
        self, request: Request, start: int, num_tokens: int, drafts: tuple[int, ...] = (), emits: bool = True
    ) -> None:
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(num_tokens)
        if drafts:
            self.drafts[request.request_id] = drafts
        if not emits:
            self.silent.add(request.request_id)

    def remove(self, request: Request) -> int:
        """Remove the row of ``request``, if it has one. Returns its ``num_tokens``, else 0."""
        if request not in self.requests:
            return 0
        row = self.requests.index(request)
        del self.requests[row], self.starts[row]
        self.drafts.pop(request.request_id, None)
        self.silent.discard(request.request_id)
        return self.counts.pop(row)

    @property
    def emitting(self) -> list[Request]:
        """The requests that emit, in order."""
        silent = self.silent
        return [r for r in self.requests if r.request_id not in silent] if silent else self.requests

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> ScheduledRequest: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScheduledRequest, ...]: ...
    def __getitem__(self, index: int | slice) -> ScheduledRequest | tuple[ScheduledRequest, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        request = self.requests[index]
        name = request.request_id
        drafts, emits = self.drafts.get(name, ()), name not in self.silent
        return ScheduledRequest(request, self.starts[index], self.counts[index], drafts, emits)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        if not self.drafts and not self.silent:
            return map(ScheduledRequest, self.requests, self.starts, self.counts)
        return map(self.__getitem__, range(len(self.requests)))


@dataclass(frozen=True, slots=True)
class FastDecodes:
    """Requests that decode one token each and have no row in the plan (see :mod:`engine.sim.fast_decode`)."""

    count: int = 0
    context: int = 0
    """Their tokens computed before the step, summed."""
    left: tuple[str, ...] = ()
    """Ids of the requests that were among them in the step before and are not now."""


NO_FAST_DECODES = FastDecodes()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the scheduler decided. ``scheduled`` has the running requests first, then the admitted ones."""

    step: int
    scheduled: Sequence[ScheduledRequest]
    """A :class:`Rows` where a :class:`~engine.scheduling.scheduler.UnifiedScheduler` made it."""
    token_budget: int
    """The budget the step began with, in tokens."""
    fast_decodes: FastDecodes = NO_FAST_DECODES
    """Requests that decode without a row; used in simulations only."""
    admitted_with_computed: dict[str, int] = field(default_factory=dict)
    """Prefix-hit tokens of each request admitted or resumed in this step."""
    preempted: tuple[str, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    """Of these, how many were passed over for something other than room, such as a grammar."""
    free_blocks: int = 0
    """Free blocks right after scheduling (cached blocks without references count as free)."""
    admission_stop: AdmissionStop | None = None
    """Why requests still wait; None when none do."""
    failed: tuple[Request, ...] = ()
    """Requests with a gate that will never open: ``update`` reports them."""
    transfers: KVTransfers | None = None
    """What the KV connector has to move."""
    padding: tuple[int, ...] = ()
    """Lengths in tokens of the sequences that static batching pads its batch with; their output is unused."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """KV blocks to copy before anything is computed: (on the device, on the host)."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """KV blocks to copy back, before anything is computed: (on the host, on the device)."""

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(self.rows.counts) + self.fast_decodes.count

    @property
    def rows(self) -> Rows:
        """``scheduled`` as columns."""
        return Rows.of(self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities for one emitted token: its own, its rank (1 = most likely), and the top k."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class OneEach(Mapping[str, list[int]]):
    """The tokens of requests that emit one each, as two columns in the order of the plan."""

    __slots__ = ("_by_id", "requests", "token_ids")

    def __init__(self, requests: Sequence[Request], token_ids: list[int]) -> None:
        self.requests, self.token_ids = requests, token_ids
        self._by_id: dict[str, int] | None = None

    def __getitem__(self, request_id: str) -> list[int]:
        if self._by_id is None:
            self._by_id = {r.request_id: t for r, t in zip(self.requests, self.token_ids, strict=True)}
        return [self._by_id[request_id]]

    def __iter__(self) -> Iterator[str]:
        return (request.request_id for request in self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner computed. A request that emits maps to at least one token (accepted drafts + 1)."""

    tokens: Mapping[str, list[int]]
    """A :class:`OneEach`, possible where no drafts were verified, saves the scheduler most of its update."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Drafts proposed for the NEXT step."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)


class RequestOutput(NamedTuple):
    """New tokens of one request after ``update``; ``finish`` is set once, on its last output."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: RequestStatus | None = None
    stop_reason: int | str | None = None
    """The id in ``stop_token_ids`` that ended it, if one did; with FINISHED_ERROR the message for the
    client."""
    logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def refused(cls, request: Request) -> RequestOutput:
        """The last output of a request that ends with its ``error``."""
        return cls(request.request_id, (), RequestStatus.FINISHED_ERROR, request.error)


@dataclass(slots=True, eq=False)
class Outputs(Sequence[RequestOutput]):
    """Request outputs as columns: one token each and nothing else, except for the rows in ``others``."""

    request_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The first token of each; unused where ``others`` has the row."""
    others: dict[int, RequestOutput] = field(default_factory=dict)
    """Rows with several tokens, logprobs or a finish, in ascending order."""

    @classmethod
    def of(cls, items: Iterable[RequestOutput]) -> Outputs:
        """The columns of ``items``; of an Outputs, itself."""
        if isinstance(items, Outputs):
            return items
        outputs = cls()
        for item in items:
            outputs.append(item)
        return outputs

    def append(self, output: RequestOutput) -> None:
        request_id, tokens, finish, _, logprobs = output
        if finish is not None or len(tokens) != 1 or logprobs:
            self.others[len(self.request_ids)] = output
        self.request_ids.append(request_id)
        self.token_ids.append(tokens[0] if tokens else PLACEHOLDER_TOKEN_ID)

    def with_tokens(self) -> list[str]:
        """The requests that emitted a token; those that were refused are left out."""
        empty = [row for row, output in self.others.items() if not output.token_ids]
        if not empty:
            return self.request_ids
        return [name for row, name in enumerate(self.request_ids) if row not in empty]

    @property
    def num_tokens(self) -> int:
        more = sum(len(output.token_ids) for output in self.others.values())
        return len(self.request_ids) - len(self.others) + more

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RequestOutput, ...]: ...
    def __getitem__(self, index: int | slice) -> RequestOutput | tuple[RequestOutput, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        row = range(len(self.request_ids))[index]
        return self.others.get(row) or RequestOutput(self.request_ids[row], (self.token_ids[row],))

    def __iter__(self) -> Iterator[RequestOutput]:
        if not self.others:
            return map(RequestOutput, self.request_ids, zip(self.token_ids))
        return map(self.__getitem__, range(len(self.request_ids)))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What ``update`` reports, and the counts that the metrics are made of."""

    outputs: Sequence[RequestOutput]
    """An :class:`Outputs` where a :class:`~engine.scheduling.scheduler.UnifiedScheduler` made it."""
    finished: tuple[Request, ...] = ()
    num_drafts: int = 0
    """Requests that verified drafts in this step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """How many requests had draft position i accepted."""

    @classmethod
    def of(cls, outputs: Outputs, finished: Sequence[Request], accepted: list[tuple[int, int]]) -> StepOutput:
        """With the sums over ``accepted``: (drafts verified, drafts accepted) per request that had drafts."""
        longest = max((count for _, count in accepted), default=0)
        return cls(
            outputs=outputs,
            finished=tuple(finished),
            num_drafts=len(accepted),
            num_draft_tokens=sum(drafts for drafts, _ in accepted),
            num_accepted_tokens=sum(count for _, count in accepted),
            accepted_per_position=tuple(
                sum(count > position for _, count in accepted) for position in range(longest)
            ),
        )
