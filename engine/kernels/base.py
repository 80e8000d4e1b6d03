"""The seam between the decoder and a device: the operations a layer is made of, and the step they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class AttentionShape:
    """What is the same for every attention layer. Sizes in elements; ``block_size`` in tokens."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share one KV head (GQA)."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens, the sequences laid end to end. All arrays are int32.

    Of sequence ``s`` this step computes tokens ``query_start[s] : query_start[s + 1]`` of the batch. With
    them it has ``context_lens[s]`` tokens, in blocks ``tables[table_start[s] : table_start[s + 1]]``.
    """

    positions: Int32
    slots: Int32
    """Where each token's key and value go: ``block * block_size + offset``."""
    query_start: Int32
    context_lens: Int32
    tables: Int32
    table_start: Int32

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)


class Linear(ABC):
    """A weight matrix in whatever form the device multiplies fastest."""

    out_features: int
    nbytes: int


class Kernels(ABC):
    """A decoder layer's operations. Results go into ``out``, so that a step allocates nothing of its size.

    Shapes: T tokens, H heads, G KV heads, D head dimension. ``qkv`` rows are [q (H*D) | k (G*D) | v (G*D)],
    ``gate_up`` rows [gate | up].
    """

    shape: AttentionShape
    dtype: torch.dtype

    @abstractmethod
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a [N, K] weight; it may be freed afterwards."""

    @abstractmethod
    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        """``out[T, N] = x[T, K] @ weight.T + bias``; ``out`` may be float32."""

    @abstractmethod
    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        """``out[T, N] += x[T, K] @ weight.T + bias``: a projection back into the residual stream."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight``, statistics in fp32."""

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out[T, I] = silu(gate) * up``."""

    @abstractmethod
    def allocate_cache(self, num_blocks: int) -> Any:
        """One layer's paged keys and values, zeroed; the layout is the device's own."""

    @abstractmethod
    def begin(self, batch: Batch) -> Any:
        """What all layers of one step share, made once a step."""

    @abstractmethod
    def rope_and_store(self, qkv: torch.Tensor, cache: Any, step: Any) -> None:
        """Rotate q in place; rotate k and write it, with v, to each token's slot. Leaves k undefined."""

    @abstractmethod
    def attention(self, qkv: torch.Tensor, cache: Any, step: Any, out: torch.Tensor) -> None:
        """Causal attention of this step's queries over the cached keys: ``out[T, H*D]``."""

    @abstractmethod
    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """The most memory that these operations allocate for themselves at a time."""
