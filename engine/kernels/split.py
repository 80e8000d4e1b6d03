"""Two sets of kernels as one: linear layers of the fast one where only the other one knows the attention."""

from __future__ import annotations

from typing import Any

import torch

from engine.kernels.base import Batch, Kernels, Linear


class SplitKernels(Kernels):
    """Linear layers and row-wise operations of ``layers``; of ``attention`` what looks at heads and cache."""

    def __init__(self, layers: Kernels, attention: Kernels) -> None:
        assert layers.dtype == attention.dtype
        self.shape, self.dtype = attention.shape, attention.dtype
        self._layers, self._attention = layers, attention

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return self._layers.pack(weight, bias)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._layers.linear(x, linear, out)

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._layers.linear_add(x, linear, out)

    def pack_norm(self, weight: torch.Tensor, offset: float) -> torch.Tensor:
        return self._attention.pack_norm(weight, offset)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        # Weights of another type, such as Gemma's in fp32, are those that only `attention` packs.
        kernels = self._layers if weight.dtype == self.dtype else self._attention
        kernels.rms_norm(x, weight, eps, out)

    def norm_heads(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        self._attention.norm_heads(qkv, q_weight, k_weight, eps)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._layers.silu_mul(gate_up, out)

    def gelu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._layers.gelu_mul(gate_up, out)

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return self._layers.argmax(logits)

    def allocate_cache(self, num_blocks: int, kind: int = 0) -> Any:
        return self._attention.allocate_cache(num_blocks, kind)

    def begin(self, batch: Batch) -> Any:
        return self._attention.begin(batch)

    def rope_and_store(self, qkv: torch.Tensor, cache: Any, step: Any) -> None:
        self._attention.rope_and_store(qkv, cache, step)

    def attention(self, qkv: torch.Tensor, cache: Any, step: Any, out: torch.Tensor) -> None:
        self._attention.attention(qkv, cache, step, out)

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        sizes = max_tokens, max_sequences, max_model_len
        return max(self._layers.scratch_bytes(*sizes), self._attention.scratch_bytes(*sizes))
