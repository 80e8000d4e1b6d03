"""A request and how its tokens are chosen. Its scheduling state is one number, ``num_computed_tokens``."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt


class Hasher(Protocol):
    """One of hashlib."""

    def update(self, data: bytes, /) -> None: ...
    def digest(self) -> bytes:
        """Of all that it was fed so far."""


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting for its grammar"
    WAITING_FOR_REMOTE_KVS = "waiting for its KV"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    """Preempted with its KV blocks in host memory (two-track scheduler)."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What the output must look like: exactly one of the five kinds. vLLM's names.

    Hashable, so that equal ones share a compiled grammar. Raises ValueError.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as the object itself; kept as text."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Lark or GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its parts."""
    whitespace_pattern: str | None = None
    """A regex of the white space that may stand between the parts of JSON."""

    def __post_init__(self) -> None:
        kinds = [name for name in STRUCTURE_KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise ValueError(f"give one of {', '.join(STRUCTURE_KINDS)}, not {' and '.join(kinds) or 'none'}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not self.choice:
                raise ValueError("choice must be a list of at least one string")
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json is not None and not isinstance(self.json, str):
            object.__setattr__(self, "json", json.dumps(self.json))


STRUCTURE_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's sampling parameters, same names, same defaults (except ``max_tokens``: always explicit)."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    """Stop strings; matched on text, outside the engine process."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many top alternatives to report beside each token's own logprob; None: none."""
    structured_outputs: StructuredOutputsParams | None = None
    """The output matches this structure, and ends where the structure ends, regardless of ``min_tokens`` and
    ``ignore_eos``."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class GateError(Exception):
    """What a request waits for will never be there."""


class Gate(ABC):
    """Something a request needs, beside its turn, before it can run: such as a grammar that is compiled.

    Set ``request.gate`` before the scheduler gets the request. Whenever the request could be admitted, the
    scheduler asks whether the gate is open. While it is not, others are admitted and the request keeps its
    place in the queue. Once the gate is open it is dropped, and the request is like any other.
    """

    status: RequestStatus
    """The request's status until the gate is open."""
    then: RequestStatus = RequestStatus.WAITING
    """Its status afterwards."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether the gate is open. Returns at once. Raises GateError if it never will be: the request
        then ends with FINISHED_ERROR."""


class OutputGrammar(Protocol):
    """The structure of a request's output, compiled: see ``engine.structured``."""

    @property
    def error(self) -> str:
        """Why the output cannot go on; "" while it can."""

    def copy(self) -> Self:
        """One for another request, at the same place."""

    def allowed(
        self, output: Sequence[int], drafts: Sequence[int] = ()
    ) -> list[npt.NDArray[np.bool_] | None]:
        """What may follow ``output``, and each of ``drafts`` after it: 1 + len(drafts) rows [vocab]."""

    def keep_valid(self, output: Sequence[int], drafts: list[int]) -> list[int]:
        """The first of ``drafts`` that may follow ``output``."""


@dataclass(slots=True, eq=False)  # a request equals only itself
class Request:
    """One sequence. ``token_ids`` is the prompt followed by every emitted token."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_time: float = 0.0
    """Orders requests of equal priority; any monotone number (seconds in the server, an index in explain)."""

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    spec_token_ids: list[int] = field(default_factory=list)
    """Drafts proposed after the last step, to be verified in the next one."""
    num_placeholders: int = 0
    """With async scheduling: how many tokens, drafts included, a step in flight has yet to decide."""
    block_ids: list[int] = field(default_factory=list)
    """The block table: physical block of each ``block_size`` tokens. Owned by the KVCacheManager."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash of ``token_ids`` up to the end of each full block, computed once. Owned by the KVCacheManager."""
    hasher: Hasher | None = None
    """Hasher of the tokens that ``block_hashes`` cover. Owned by the KVCacheManager."""
    num_hashed_blocks: int = 0
    """How many blocks of the table carry their hash. Owned by the KVCacheManager."""
    cache_salt: str = ""
    """Requests share prefix blocks only with requests of the same salt."""
    lora_name: str = ""
    """The adapter that it asks for; "": none. Requests share prefix blocks only within one adapter."""
    length_limit: int = 0
    """Number of tokens, prompt included, at which it ends by length. Set by the scheduler when it is
    added."""
    stop_set: frozenset[int] = frozenset()
    """Tokens that may end it: see :meth:`stops_with`. Set by the scheduler when it is added."""
    mid_prefill: bool = False
    """True after a step that left it short of its own tokens: it emitted nothing."""
    num_preemptions: int = 0
    num_external_tokens: int = 0
    """How many of its computed tokens a KV connector loaded last."""
    num_cached_tokens: int = 0
    """Prefix-hit tokens at the first admission."""
    gate: Gate | None = None
    """What it waits for beside its turn, or None. Set before it is added, cleared once it is open."""
    grammar: OutputGrammar | None = None
    """Its ``structured_outputs``, once compiled. Kept through a preemption."""
    error: str = ""
    """Why it ended with FINISHED_ERROR; the message for the client."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    def check_size(self, max_model_len: int) -> None:
        """Raise ValueError for a request that could never be computed, or never end."""
        name = f"request {self.request_id!r}"
        if not self.prompt_token_ids:
            raise ValueError(f"{name}: the prompt is empty")
        if self.num_prompt_tokens >= max_model_len:
            raise ValueError(
                f"{name}: the prompt has {self.num_prompt_tokens} tokens, which leaves no room for output in "
                f"max_model_len ({max_model_len})"
            )
        if self.sampling.max_tokens < 1:
            raise ValueError(f"{name}: max_tokens is {self.sampling.max_tokens}, must be at least 1")

    def stops_with(self, token: int, max_model_len: int) -> tuple[RequestStatus | None, int | None]:
        """Why the request ends with ``token``, its last: EOS, then stop ids (and which), then length."""
        sampling = self.sampling
        outputs = self.num_output_tokens
        if outputs >= sampling.min_tokens:
            if token in self.eos_token_ids and not sampling.ignore_eos:
                return RequestStatus.FINISHED_STOPPED, None
            if token in sampling.stop_token_ids:
                return RequestStatus.FINISHED_STOPPED, token
        if self.num_tokens >= max_model_len or outputs >= sampling.max_tokens:
            return RequestStatus.FINISHED_LENGTH, None
        return None, None
