"""Prompt lookup: what followed the last few tokens when they occurred before is proposed again."""

from __future__ import annotations

import numpy as np

from engine.kernels.base import Int32
from engine.spec.history import TokenHistories
from engine.spec.proposer import Proposer, TargetStep
from engine.speculative_config import SpeculativeConfig


class NgramProposer(Proposer):
    """Drafts from the request's own tokens; no model. Same choice as vLLM's n-gram proposer."""

    def __init__(self, config: SpeculativeConfig, max_model_len: int) -> None:
        self._k = config.num_speculative_tokens
        self._min, self._max = config.prompt_lookup_min, config.prompt_lookup_max
        self._max_model_len = max_model_len
        self._histories = TokenHistories()

    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        self._histories.remove_finished()
        if not step.drafting:
            return {}
        return {
            request.request_id: self.draft(self._histories.of(request).extended(emitted))
            for request, emitted in step.emitting()
        }

    def draft(self, tokens: Int32) -> list[int]:
        """Up to k tokens after the first occurrence of the longest suffix (min to max tokens) that recurs."""
        k = min(self._k, self._max_model_len - len(tokens))
        if k <= 0 or len(tokens) < self._min + 1:
            return []
        end = self._match_end(tokens)
        if end is None:
            return []
        draft: list[int] = tokens[end : end + k].tolist()
        return draft

    def _match_end(self, tokens: Int32) -> int | None:
        """Where the best earlier occurrence of the suffix ends: the longest, of equals the first."""
        total = len(tokens)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # an occurrence of 1 token ends here
        best: int | None = None
        for length in range(1, min(self._max, total - 1) + 1):
            if length > 1:
                ends = ends[ends >= length]
                ends = ends[tokens[ends - length] == tokens[total - length]]
            if not len(ends):
                break
            if length >= self._min:
                best = int(ends[0])
        return best
