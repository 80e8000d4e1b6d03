"""What draft models and EAGLE heads share: one ragged pass over what is new, then a token at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from engine.config import EngineConfig
from engine.kernels.base import Batch, Int32
from engine.models.model import Decoder, Workspace
from engine.request import Request, RequestStatus
from engine.sampling.sampler import GREEDY_BELOW, Sampler
from engine.spec.proposer import Proposer, TargetStep

MAX_PASS_TOKENS = 512
"""A longer pass is made in parts: from here on larger ones are no faster a token, only larger."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of one request that a pass computes, at positions from ``first`` on."""

    request: Request
    table: list[int]
    first: int
    tokens: Sequence[int]
    row: int = 0
    """The row of the target's hidden states that belongs to the first of them."""
    drafts: int = 0
    """How many drafts are to follow."""

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    def part(self, start: int, stop: int) -> TokenSpan:
        return TokenSpan(
            self.request, self.table, self.first + start, self.tokens[start:stop], self.row + start
        )


class NetworkProposer(Proposer):
    """A decoder that drafts: greedily, or drawn at each request's temperature from its own distribution."""

    def __init__(self, config: EngineConfig, decoder: Decoder, max_positions: int) -> None:
        speculative = config.speculative_config
        assert speculative is not None
        self._k = speculative.num_speculative_tokens
        self._draws = speculative.draft_sample_method == "probabilistic"
        self._decoder, self._max_positions = decoder, max_positions
        self._block_size, self._max_num_seqs = config.block_size, config.max_num_seqs
        self._tokens_at_once = max(MAX_PASS_TOKENS, config.max_num_seqs)
        self._workspace = Workspace(
            decoder.config, decoder.kernels.dtype, self._tokens_at_once, config.max_num_seqs
        )
        self._caches: list[Any] = []
        self._sampler = Sampler(config.seed)
        self._drawn_from: dict[str, tuple[Request, torch.Tensor]] = {}
        shape = decoder.kernels.shape
        self.kv_bytes_per_token = shape.kv_bytes(decoder.kernels.dtype) * decoder.config.num_layers

    def activation_bytes(self) -> int:
        seqs = self._max_num_seqs
        operations = self._decoder.kernels.scratch_bytes(self._tokens_at_once, seqs, self._max_positions)
        row = 4 * self._decoder.config.vocab_size
        kept = seqs * self._k * row if self._draws else 0
        return self._workspace.nbytes + operations + kept + Sampler.scratch_bytes(seqs, row // 4)

    def allocate(self, num_blocks: int) -> None:
        model, kernels = self._decoder.config, self._decoder.kernels
        self._caches = [
            kernels.allocate_cache(num_blocks, model.kind_of(layer)) for layer in range(model.num_layers)
        ]

    def propose(self, step: TargetStep) -> dict[str, list[int]]:
        self._forget_distributions(step)
        spans = self._spans(step)
        last = self._compute(spans, step.hidden)
        chosen = [place for place, span in enumerate(spans) if span.drafts]
        if not chosen:
            return {}
        drafts = self._draft([spans[place] for place in chosen], last[chosen])
        self._drafted(drafts)
        return drafts

    def probabilities(self, request_id: str) -> torch.Tensor | None:
        drawn_from = self._drawn_from.get(request_id)
        return None if drawn_from is None else drawn_from[1]

    def _forget_distributions(self, step: TargetStep) -> None:
        """Of drafts that were just verified, and of those that never will be."""
        for item in step.scheduled:
            self._drawn_from.pop(item.request.request_id, None)
        running = RequestStatus.RUNNING
        self._drawn_from = {k: v for k, v in self._drawn_from.items() if v[0].status is running}

    @abstractmethod
    def _spans(self, step: TargetStep) -> list[TokenSpan]:
        """What is to be computed after a step of the target."""

    @abstractmethod
    def _forward(self, token_ids: torch.Tensor, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The residual stream [T, hidden]. ``features`` [T, hidden]: of the token before each, as the
        target, or this network in the target's place, has computed them."""

    @abstractmethod
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 logits [R, vocab] of rows of the residual stream; may be overwritten."""

    def _features(self, target_hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What ``_forward`` wants of rows of the target's residual stream [T, hidden]."""
        return target_hidden

    def _drafted(self, drafts: dict[str, list[int]]) -> None:
        """Told of what was proposed; the KV of all drafts but the last is computed."""

    def _room(self, table: list[int], position: int) -> int:
        """How many tokens fit behind ``position``, its own included, into blocks and context."""
        return min(len(table) * self._block_size, self._max_positions) - position

    def _compute(self, spans: Sequence[TokenSpan], target_hidden: torch.Tensor) -> torch.Tensor:
        """Write the KV of all spans; the residual stream of each one's last token, [spans, hidden]."""
        kernels = self._decoder.kernels
        last = torch.empty(len(spans), self._decoder.config.hidden_size, dtype=kernels.dtype)
        for places, parts in self._parts(spans):
            rows = np.concatenate([np.arange(part.row, part.row + len(part.tokens)) for part in parts])
            tokens = torch.tensor([token for part in parts for token in part.tokens])
            batch = make_batch(
                [part.table for part in parts],
                np.array([part.first for part in parts], dtype=np.int32),
                np.array([len(part.tokens) for part in parts], dtype=np.int32),
                self._block_size,
            )
            features = self._features(target_hidden, torch.from_numpy(rows))
            hidden = self._forward(tokens, features, batch)
            last[places] = hidden[torch.from_numpy(batch.query_start[1:] - 1).long()]
        return last

    def _parts(self, spans: Sequence[TokenSpan]) -> Iterator[tuple[list[int], list[TokenSpan]]]:
        """The spans, cut into passes of ``_tokens_at_once``, and their places in ``spans``."""
        places: list[int] = []
        parts: list[TokenSpan] = []
        room = self._tokens_at_once
        for place, span in enumerate(spans):
            done = 0
            while done < len(span.tokens):
                count = min(room, len(span.tokens) - done)
                places.append(place)
                parts.append(span.part(done, done + count))
                done, room = done + count, room - count
                if not room:
                    yield places, parts
                    places, parts, room = [], [], self._tokens_at_once
        if parts:
            yield places, parts

    def _draft(self, spans: Sequence[TokenSpan], last: torch.Tensor) -> dict[str, list[int]]:
        """Up to k drafts behind each span, whose last tokens left ``last`` [spans, hidden]; all spans in one
        pass for each draft."""
        all_spans = spans
        drafts: dict[str, list[int]] = {span.request.request_id: [] for span in spans}
        distributions: dict[str, list[torch.Tensor]] = {}
        positions = np.array([span.end for span in spans], dtype=np.int32)
        tokens: list[int] = []
        for place in range(self._k):
            wanted = [index for index, span in enumerate(spans) if span.drafts > place]
            if not wanted:
                break
            if place:
                spans, tokens = [spans[index] for index in wanted], [tokens[index] for index in wanted]
                last, positions = last[wanted], positions[wanted]
                tables = [span.table for span in spans]
                batch = make_batch(tables, positions, np.ones(len(spans), dtype=np.int32), self._block_size)
                last = self._forward(torch.tensor(tokens), last, batch).clone()
                positions = positions + 1
            tokens = self._choose(self._logits(last), spans, place, distributions)
            for span, token in zip(spans, tokens, strict=True):
                drafts[span.request.request_id].append(token)
        for span in all_spans:
            if rows := distributions.get(span.request.request_id):
                self._drawn_from[span.request.request_id] = span.request, torch.stack(rows)
        return drafts

    def _choose(
        self,
        logits: torch.Tensor,
        spans: Sequence[TokenSpan],
        place: int,
        distributions: dict[str, list[torch.Tensor]],
    ) -> list[int]:
        """A token of each row [spans, vocab]; what it was drawn from is added to ``distributions``."""
        tokens: list[int] = logits.argmax(-1).tolist()
        if not self._draws:
            return tokens
        for row, span in enumerate(spans):
            request = span.request
            if request.sampling.temperature < GREEDY_BELOW:
                continue
            position = span.end - request.num_prompt_tokens + place
            drawn = self._sampler.draw_draft(logits[row], request.sampling, position)
            tokens[row] = drawn.token
            distributions.setdefault(request.request_id, []).append(drawn.distribution)
        return tokens


def make_batch(tables: Sequence[list[int]], starts: Int32, counts: Int32, block_size: int) -> Batch:
    """The batch in which sequence s computes ``counts[s]`` tokens from position ``starts[s]`` on."""
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    context = starts + counts
    used = -(-context // block_size)
    table_start = np.concatenate(([0], np.cumsum(used))).astype(np.int32)
    blocks = chain.from_iterable(table[:count] for table, count in zip(tables, used.tolist(), strict=True))
    flat = np.fromiter(blocks, dtype=np.int32, count=int(table_start[-1]))
    sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    positions = np.arange(query_start[-1], dtype=np.int32) - query_start[sequence] + starts[sequence]
    slots = flat[table_start[sequence] + positions // block_size] * block_size + positions % block_size
    return Batch(positions, slots, query_start, context, flat, table_start)
