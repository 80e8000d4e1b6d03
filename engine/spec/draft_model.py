"""A smaller model of the same vocabulary drafts, one token after another."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.config import EngineConfig
from engine.kernels import make_kernels
from engine.kernels.base import Batch
from engine.models.checkpoint import load_model_config, open_checkpoint
from engine.models.model import Decoder, TensorError, attention_shape, layer_rope_tables, load_decoder
from engine.models.model_error import ModelError
from engine.models.weights import resolve_model
from engine.request import Request
from engine.spec.network import NetworkProposer, TokenSpan
from engine.spec.proposer import TargetStep
from engine.step import ScheduledRequest


@dataclass(slots=True)
class _Seen:
    """How far the draft model's KV of a request goes."""

    request: Request
    table: list[int]
    count: int = 0
    """Positions ``[0, count)`` are computed."""
    ahead: list[int] = field(default_factory=list)
    """Drafts whose KV is computed at the positions after ``count``; valid as far as they are accepted."""


class DraftModelProposer(NetworkProposer):
    """A smaller model drafts. Its KV lies in the target's blocks.

    It follows the target step by step, and catches up with the steps in which no drafts were wanted. Blocks
    shared through the prefix cache are used where this model has computed them, else it computes them.
    """

    def __init__(self, config: EngineConfig, target: Decoder) -> None:
        """Raises ModelError for a draft that does not load, or is of another vocabulary."""
        speculative, max_model_len = config.speculative_config, config.max_model_len
        assert speculative is not None
        assert speculative.model is not None
        assert max_model_len is not None
        path = resolve_model(speculative.model)
        load_format = "dummy" if config.load_format == "dummy" else "auto"
        model = load_model_config(path, load_format)
        if model.vocab_size != target.config.vocab_size:
            raise ModelError(
                f"draft model {path}: its vocabulary has {model.vocab_size} tokens, the served model's "
                f"{target.config.vocab_size}; a draft model must have the same tokenizer"
            )
        length = min(max_model_len, model.max_position_embeddings)
        model = model.within(length)
        shape = attention_shape(model, config.block_size)
        kernels = make_kernels(shape, target.kernels.dtype, *layer_rope_tables(model, length))
        checkpoint = open_checkpoint(path, load_format, config.seed)
        try:
            decoder = load_decoder(model, kernels, checkpoint.tensors())
        except TensorError as error:
            raise ModelError(f"draft model {path}: {error}") from None
        super().__init__(config, decoder, length)
        self.weights_bytes = decoder.weights_bytes
        self._budget = config.max_num_batched_tokens + config.max_num_seqs
        self._seen: dict[str, _Seen] = {}
        self._complete = np.zeros(0, dtype=bool)

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        self._complete = np.zeros(num_blocks, dtype=bool)

    def _spans(self, step: TargetStep) -> list[TokenSpan]:
        self._forget_finished()
        spans: list[TokenSpan] = []
        budget = self._budget if step.drafting else 0
        for item, table in zip(step.scheduled, step.tables, strict=True):
            emitted = step.tokens.get(item.request.request_id, [])
            span = self._span(item, table, emitted, budget)
            budget -= len(span.tokens)
            if span.tokens:
                spans.append(span)
        return spans

    def _span(self, item: ScheduledRequest, table: list[int], emitted: list[int], budget: int) -> TokenSpan:
        """What one request lacks, up to ``budget`` tokens. Its blocks are marked as computed at once, since a
        request that shares them comes later in the same pass."""
        request, seen = item.request, self._seen_of(item, table)
        known = item.start + item.num_tokens - len(item.drafts) + len(emitted)
        tokens = [*request.token_ids[seen.count :], *emitted][: known - seen.count]
        hits = 0
        while hits < min(len(seen.ahead), len(tokens)) and seen.ahead[hits] == tokens[hits]:
            hits += 1
        first, tokens = seen.count + hits, tokens[hits:]
        count = max(min(len(tokens), budget, self._room(table, first)), 0)
        seen.count, seen.ahead = first + count, []
        full = seen.count // self._block_size
        self._complete[table[first // self._block_size : full]] = True
        self._complete[table[full:]] = False
        drafts = 0
        if emitted and 0 < count == len(tokens):
            # The first draft needs no slot, and no draft may lie beyond the context.
            drafts = min(self._k, self._room(table, seen.count) + 1, self._max_positions - seen.count)
        return TokenSpan(request, table, first, tokens[:count], drafts=max(drafts, 0))

    def _seen_of(self, item: ScheduledRequest, table: list[int]) -> _Seen:
        """How far the draft model is with a request; after an admission, as far as its shared blocks go."""
        request = item.request
        seen = self._seen.get(request.request_id)
        if seen is None or seen.table is not table:
            shared = self._complete[table[: item.start // self._block_size]]
            complete = len(shared) if shared.all() else int(shared.argmin())
            seen = _Seen(request, table, complete * self._block_size)
            self._seen[request.request_id] = seen
        return seen

    def _forget_finished(self) -> None:
        for name in [name for name, seen in self._seen.items() if seen.request.status.finished]:
            del self._seen[name]

    def _drafted(self, drafts: dict[str, list[int]]) -> None:
        for name, tokens in drafts.items():
            self._seen[name].ahead = tokens[:-1]

    def _forward(self, token_ids: torch.Tensor, features: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._decoder.forward(token_ids, batch, self._caches, self._workspace)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden, torch.arange(len(hidden)), self._workspace)
