"""Which requests wait for KV that a connector loads, and which blocks it writes to."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.kv_cache import KVCacheManager
from engine.kv.kv_transfer import KVConnector, KVLoad, KVTransfers
from engine.request import Gate, Request


class KVLoading:
    """Books of the loads of one scheduler. Without a connector there are none."""

    def __init__(self, kv: KVCacheManager, connector: KVConnector | None) -> None:
        self._kv, self.connector = kv, connector
        self._holding: list[Request] = []
        """Waiting requests that hold blocks into which KV is, or was, loaded. In order of their loads."""
        self._abandoned: list[KVLoad] = []
        """Unfinished loads of requests that are gone; they still write to their blocks."""

    def match(self, request: Request, num_computed: int) -> int:
        """How many tokens behind the first ``num_computed`` the connector can load: whole blocks."""
        return self.connector.get_num_new_matched_tokens(request, num_computed) if self.connector else 0

    def begin(self, request: Request, num_tokens: int) -> None:
        """Load ``num_tokens`` into the blocks that ``request`` has for them."""
        assert self.connector is not None
        request.gate = self.connector.update_state_after_alloc(request, num_tokens)
        request.status = request.gate.status
        self._holding.append(request)

    def open(self, request: Request, gate: Gate) -> None:
        """``gate`` is ready. Loaded tokens count as computed, and can be hit from now on. A request's last
        token is always left to compute."""
        request.gate, request.status = None, gate.then
        if isinstance(gate, KVLoad):
            local = request.num_computed_tokens
            self._kv.hash_blocks(request, local + gate.num_tokens)
            request.num_computed_tokens = min(local + gate.num_tokens, request.num_tokens - 1)
            request.num_external_tokens = request.num_computed_tokens - local

    def admitted(self, request: Request) -> None:
        """The request runs, so its blocks need no special care any more."""
        if request in self._holding:
            self._holding.remove(request)

    def let_go(self, request: Request) -> None:
        """Free the request's blocks, once nothing is loaded into them any more."""
        self.admitted(request)
        if isinstance(request.gate, KVLoad) and not request.gate.ready():
            self._abandoned.append(request.gate)
        else:
            self._kv.free(request)
            request.num_computed_tokens = request.num_external_tokens = 0

    def take_back(self, before: Request | None = None) -> bool:
        """Free the blocks of the last waiting request that holds some, other than ``before``. Done before a
        running request is preempted, and so that waiting requests do not block each other."""
        for request in reversed(self._holding):
            gate = request.gate
            if request is before or (gate is not None and not gate.ready()):
                continue
            if gate is not None:
                self.open(request, gate)
            self.let_go(request)
            return True
        return False

    def reap(self) -> None:
        """Free the blocks of abandoned loads that have ended."""
        if self._abandoned:
            for load in self._abandoned:
                if load.ready():
                    self._kv.free(load.request)
            self._abandoned = [load for load in self._abandoned if not load.ready()]

    def transfers(self) -> KVTransfers | None:
        """What the plan that is being made has to have moved."""
        return self.connector.build_connector_meta() if self.connector else None

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that blocks and loads agree with ``requests``, which are all there are."""
        holding = {id(request) for request in self._holding}
        assert holding <= {id(request) for request in requests}
        for request in self._holding:
            assert request.gate is not None or request.block_ids
        self._kv.check([*requests, *(load.request for load in self._abandoned)])

    def holds(self, request: Request) -> bool:
        return any(request is holder for holder in self._holding)
