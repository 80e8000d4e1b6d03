"""The interface between the decoder and a device: the operations of a layer, and the step they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.kv.kv_format import AUTO, KVFormat

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class AttentionShape:
    """What is the same for every attention layer, and the kinds of layers that there are.

    Sizes in elements; ``block_size`` and windows in tokens.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float
    windows: tuple[int | None, ...] = (None,)
    """Of each kind of layer: how many tokens a query sees, itself included; None: all before it.

    Kinds may also differ by their rotary tables: kernels are made with cos and sin, fp32, each
    [kinds, max_model_len, head_dim / 2]."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)`` before the softmax (Gemma 2)."""
    kv_format: KVFormat = AUTO

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

    @property
    def is_plain(self) -> bool:
        """Whether it is what every set of kernels must be able to do: one kind of layer that sees everything,
        no soft cap, keys and values stored as they are computed."""
        return self.windows == (None,) and self.softcap is None and self.kv_format == AUTO

    def kv_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in one layer, scales included."""
        return 2 * self.num_kv_heads * self.kv_format.bytes_per_head(self.head_dim, dtype)


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
    """A weight matrix in the layout that the device multiplies fastest."""

    out_features: int
    nbytes: int


class FusedLayers(Protocol):
    """All layers of a decoder as one operation: on what ``begin`` returned, the layers' caches, and the
    workspace (see model.py), whose residual stream it changes. The rest of the workspace is undefined
    afterwards."""

    nbytes: int
    """Bytes of its own buffers."""

    def __call__(self, step: Any, caches: Sequence[Any], workspace: Any) -> None: ...


class Kernels(ABC):
    """A decoder layer's operations. Results go into ``out``, so that a step allocates nothing of its size.

    Shapes: T tokens, H heads, G KV heads, D head dimension. ``qkv`` rows are [q (H*D) | k (G*D) | v (G*D)],
    ``gate_up`` rows [gate | up].

    A device must have the abstract operations, for a plain :class:`AttentionShape`. The others, which only
    some models need, work with torch on any device, and may be overridden where they matter.
    """

    shape: AttentionShape
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")
    """Where weights, caches and activations are."""

    def upload(self, numbers: Sequence[int] | Int32) -> torch.Tensor:
        """Whole numbers of a step, such as token ids, as a tensor on the device; not waited for."""
        return torch.from_numpy(np.asarray(numbers, dtype=np.int32))

    @abstractmethod
    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a [N, K] weight; it may be freed afterwards."""

    def pack_exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """:meth:`pack` where the weight must not be quantised: that of a LoRA adapter."""
        return self.pack(weight, bias)

    @abstractmethod
    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        """``out[T, N] = x[T, K] @ weight.T + bias``; ``out`` may be float32."""

    @abstractmethod
    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        """``out[T, N] += x[T, K] @ weight.T + bias``: a projection back into the residual stream."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """``out = x / sqrt(mean(x^2) + eps) * weight``, statistics in fp32. ``out`` may be ``x``."""

    def pack_norm(self, weight: torch.Tensor, offset: float) -> torch.Tensor:
        """``weight + offset`` as ``rms_norm`` takes it; a copy, so that the weight may be freed."""
        return (weight.float() + offset).to(self.dtype)

    def norm_heads(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        """RMSNorm of each head of q and of k, in place; weights [D], as ``pack_norm`` gives them."""
        sizes = [self.shape.query_size, self.shape.kv_size, self.shape.kv_size]
        for part, weight in zip(qkv.split(sizes, dim=-1), (q_weight, k_weight), strict=False):
            heads = part.unflatten(-1, (-1, self.shape.head_dim))
            wide = heads.float()
            wide *= torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            heads.copy_(wide.to(weight.dtype) * weight)

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out[T, I] = silu(gate) * up``."""

    def gelu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """``out[T, I] = gelu(gate) * up``, gelu by its approximation with tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.gelu(gate, approximate="tanh"), up, out=out)

    @abstractmethod
    def allocate_cache(self, num_blocks: int, kind: int = 0) -> Any:
        """The paged keys and values, zeroed, of a layer of the given kind, which it remembers.

        The layout is the device's own. On the CPU: keys, and values, are
        [blocks, KV heads, block_size, head_dim] as the format holds numbers (fp8 as bytes), and beside them,
        where the format has scales, fp32 [blocks, KV heads, block_size]. In every layout the tensors are
        fields of dataclasses, and blocks their first dimension, so that blocks can be copied without
        knowing it.
        """

    @abstractmethod
    def begin(self, batch: Batch) -> Any:
        """What all layers of one step share, made once per step."""

    @abstractmethod
    def rope_and_store(self, qkv: torch.Tensor, cache: Any, step: Any) -> None:
        """Rotate q in place; rotate k and write it, with v, to each token's slot. Leaves k undefined.

        Rotary tables are those of the cache's kind; k and v are stored in the shape's ``kv_format``.
        """

    @abstractmethod
    def attention(self, qkv: torch.Tensor, cache: Any, step: Any, out: torch.Tensor) -> None:
        """Causal attention of this step's queries over the cached keys: ``out[T, H*D]``.

        A query at position p sees keys from ``p - window + 1`` on, window being that of the cache's kind.
        """

    def warm_up(self, caches: Sequence[Any]) -> int:
        """Do ahead what would make the first steps over ``caches`` slower than later ones. Returns how many
        kernels were launched for it."""
        return 0

    def run(self, step: Any, tokens: int, layers: Callable[[int], None], recordable: bool = True) -> None:
        """Compute the layers of a step of ``tokens`` tokens: ``layers(tokens)``, which works on the first so
        many rows of the workspace. A device may do so for more rows if it likes; and, if it is
        ``recordable``, record what it launches and launch the same again in later steps."""
        layers(tokens)

    def fuse(self, layers: Sequence[Any], eps: float) -> FusedLayers | None:
        """The decoder layers (of model.py, with SiLU) as one operation, with the results of one by one;
        None where the device has none for them."""
        return None

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The place of the largest number, the first of several, in each row of ``logits`` [R, vocab]."""
        tokens: list[int] = logits.argmax(-1).tolist()
        return tokens

    @abstractmethod
    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """The most bytes that these operations allocate at a time."""
