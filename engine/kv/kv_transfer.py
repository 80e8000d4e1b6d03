"""KV outside the device's pool: what the scheduler asks about it, and how it is moved.

The two sides of vLLM's KV connectors, with its names. The scheduler's side decides what is to be moved;
plans carry that to the worker's side, which moves it beside the runner. A request whose KV is being loaded
holds its blocks, is in the status WAITING_FOR_REMOTE_KVS, and does not block other requests. When a
load fails, its tokens are computed instead.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from engine.request import Gate, Request, RequestStatus

logger = logging.getLogger("vtune.kv_transfer")
BlockPairs = Sequence[tuple[int, int]]


class KVLoad(Gate):
    """KV of ``num_tokens`` tokens on its way to a request's blocks. ``pairs``: (block there, block here)."""

    status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(self, request: Request, num_tokens: int, pairs: BlockPairs) -> None:
        self.then = request.status
        self.request, self.num_tokens, self.pairs = request, num_tokens, pairs
        self._done = False

    def ready(self) -> bool:
        return self._done

    def finish(self, failed: bool = False) -> None:
        """Called once, from any thread, when nothing more is written to the blocks."""
        if failed:
            self.num_tokens = 0
        self._done = True


@dataclass(frozen=True, slots=True)
class KVTransfers:
    """What a plan asks to be moved: stores before the step is computed, loads beside it."""

    stores: tuple[tuple[int, int], ...] = ()
    """(block of the device, block there)."""
    loads: tuple[KVLoad, ...] = ()


class KVConnector(ABC):
    """The scheduler's side."""

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """How many tokens of ``request`` after its first ``num_computed_tokens``, which end a block, could be
        loaded: whole blocks."""

    @abstractmethod
    def update_state_after_alloc(self, request: Request, num_external_tokens: int) -> KVLoad:
        """Begin to load ``num_external_tokens``, behind the computed ones, into the request's blocks."""

    @abstractmethod
    def evicted(self, block_hash: bytes, block: int) -> None:
        """The pool reuses ``block``. Its content is there until the next step."""

    @abstractmethod
    def build_connector_meta(self) -> KVTransfers | None:
        """What is to be moved since the last time; None: nothing."""

    @abstractmethod
    def reset(self) -> bool:
        """Forget everything; False, and nothing happens, while something is being loaded."""


class BlockSwapper(Protocol):
    """Copies blocks: ``engine.kernels.host.HostBlocks``."""

    def swap(self, out: BlockPairs, back: BlockPairs) -> None: ...


class KVConnectorWorker:
    """The worker's side: stores at once, loads in a thread of its own."""

    def __init__(self, blocks: BlockSwapper) -> None:
        self._blocks = blocks
        self._thread = ThreadPoolExecutor(1, "kv-load")

    def start(self, transfers: KVTransfers) -> None:
        """Called before a step is computed."""
        self._blocks.swap(transfers.stores, ())
        for load in transfers.loads:
            self._thread.submit(self._load, load)

    def _load(self, load: KVLoad) -> None:
        try:
            self._blocks.swap((), load.pairs)
        except Exception as error:  # of any kind: the tokens are computed instead
            logger.warning(f"KV of request {load.request.request_id} was not loaded: {error}")
            load.finish(failed=True)
        else:
            load.finish()
