"""A model's log-probabilities of a given text, through the paged cache as the engine computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from engine.kernels import make_kernels
from engine.kernels.base import Batch
from engine.kv.kv_format import kv_format
from engine.models.checkpoint import load_model_config, open_checkpoint
from engine.models.model import Workspace, attention_shape, layer_rope_tables, load_decoder

BLOCK = 16


class TeacherForced:
    """One sequence at a time, in chunks: what a chunk sees of those before it comes out of the cache."""

    def __init__(
        self,
        model: Path,
        *,
        kv_cache_dtype: str = "auto",
        int8: bool = False,
        length: int = 1024,
        chunk: int = 64,
    ) -> None:
        dtype = torch.bfloat16
        config = load_model_config(model).within(length)
        shape = attention_shape(config, BLOCK, kv_format(kv_cache_dtype, dtype))
        kernels = make_kernels(shape, dtype, *layer_rope_tables(config, length), int8=int8)
        self._decoder = load_decoder(config, kernels, open_checkpoint(model).tensors())
        self._workspace = Workspace(config, dtype, chunk, chunk)
        blocks = 1 + -(-length // BLOCK)
        self._caches = [
            kernels.allocate_cache(blocks, config.kind_of(layer)) for layer in range(config.num_layers)
        ]
        self._chunk = chunk
        self.kv_bytes_per_token = shape.kv_bytes(dtype) * config.num_layers

    @torch.inference_mode()
    def log_probabilities(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Chunks of rows [vocab]: after each token, what the model gives every token to be the next one."""
        for start in range(0, len(token_ids), self._chunk):
            ids = torch.tensor(token_ids[start : start + self._chunk])
            hidden = self._decoder.forward(ids, _batch(start, len(ids)), self._caches, self._workspace)
            yield self._decoder.logits(hidden, torch.arange(len(ids)), self._workspace).log_softmax(-1)


def _batch(start: int, count: int) -> Batch:
    positions = np.arange(start, start + count, dtype=np.int32)
    blocks = np.arange(1, 2 + (start + count - 1) // BLOCK, dtype=np.int32)
    return Batch(
        positions=positions,
        slots=positions + BLOCK,  # block i + 1 holds the sequence's block i; block 0 is the null block
        query_start=np.array([0, count], dtype=np.int32),
        context_lens=np.array([start + count], dtype=np.int32),
        tables=blocks,
        table_start=np.array([0, len(blocks)], dtype=np.int32),
    )
