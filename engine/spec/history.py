"""The tokens of running requests as arrays: a list would be converted anew for every proposal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.kernels.base import Int32
from engine.request import Request


class TokenHistory:
    """One request's tokens. Requests only ever grow, preempted ones too."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens = np.empty(max(64, 2 * request.num_tokens), dtype=np.int32)
        self._count = 0

    def extended(self, emitted: Sequence[int]) -> Int32:
        """``token_ids`` and what was emitted after them: a view, good until the next call."""
        total = self.request.num_tokens + len(emitted)
        if total > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * total)
        self._tokens[self._count : self.request.num_tokens] = self.request.token_ids[self._count :]
        self._tokens[self.request.num_tokens : total] = emitted
        self._count = self.request.num_tokens
        return self._tokens[:total]


class TokenHistories:
    """TokenHistories of requests, by their ids, until they are finished."""

    def __init__(self) -> None:
        self._of: dict[str, TokenHistory] = {}

    def __len__(self) -> int:
        return len(self._of)

    def of(self, request: Request) -> TokenHistory:
        history = self._of.get(request.request_id)
        if history is None or history.request is not request:
            history = self._of[request.request_id] = TokenHistory(request)
        return history

    def remove_finished(self) -> list[Request]:
        """Forget requests that have ended, and say which."""
        finished = [h.request for h in self._of.values() if h.request.status.finished]
        for request in finished:
            del self._of[request.request_id]
        return finished
