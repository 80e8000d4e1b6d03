"""A request and how its tokens are chosen. Its scheduling state is one number, ``num_computed_tokens``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def finished(self) -> bool:
        return self.name.startswith("FINISHED")


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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(slots=True, eq=False)  # a request is itself, whatever its fields say
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
    block_ids: list[int] = field(default_factory=list)
    """The block table: physical block of each ``block_size`` tokens. Owned by the KVCacheManager."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chained hash of each full block of ``token_ids``, computed once. Owned by the KVCacheManager."""
    num_hashed_blocks: int = 0
    """How many blocks of the table carry their hash. Owned by the KVCacheManager."""
    cache_salt: str = ""
    """Requests share prefix blocks only with requests of the same salt."""
    mid_prefill: bool = False
    """True after a step that left it short of its own tokens: it emitted nothing."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prefix-hit tokens at the first admission."""

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
