"""The torch path of the CPU: works everywhere, and is what the C++ kernels are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.kernels.base import AttentionShape, Batch, Int32, Kernels, Linear
from engine.kernels.int8 import Int8Linear
from engine.kv.kv_format import KVFormat

PACKED_ROWS = 64
"""Up to this many rows oneDNN multiplies faster with a weight reordered ahead (1.5x at 1-16 rows)."""

GATHER_BYTES = 4 << 20
"""Decoding sequences are attended together in groups whose gathered keys and values stay below this."""

QUERY_CHUNK_TOKENS = 256
"""Query tokens of one sequence attended at a time: bounds the mask."""


class TorchLinear(Linear):
    """A weight as it is, and reordered for oneDNN where that is to be had."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight.contiguous(), bias
        self.out_features = weight.shape[0]
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear(TorchLinear):
    """Keeps oneDNN's own layout beside the plain one, which is quicker for many rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACKED_ROWS // 2)
        self.nbytes += weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > PACKED_ROWS:
            return super().__call__(x)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


@dataclass(frozen=True)
class Paged:
    """A layer's keys, or its values, in the layout that ``Kernels.allocate_cache`` describes."""

    stored: torch.Tensor
    scales: torch.Tensor | None
    format: KVFormat

    @classmethod
    def allocate(
        cls, shape: AttentionShape, dtype: torch.dtype, num_blocks: int, device: torch.device | None = None
    ) -> Paged:
        kind, slots = shape.kv_format, (num_blocks, shape.num_kv_heads, shape.block_size)
        stored = torch.zeros((*slots, shape.head_dim), dtype=kind.held_as or dtype, device=device)
        return cls(stored, torch.zeros(slots, device=device) if kind.scaled else None, kind)

    def write(self, x: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Put the rows of ``x`` [T, KV heads, head_dim] into their slots."""
        stored, scales = self.format.quantize(x)
        # Indexing on both sides of a slice puts the indexed dimension first: [T, KV heads, head_dim].
        self.stored[blocks, :, offsets] = stored.view(self.stored.dtype)
        if self.scales is not None and scales is not None:
            self.scales[blocks, :, offsets] = scales

    def gather(self, tables: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What some block tables [S, W] hold, in ``dtype``: ``[S, KV heads, W * block_size, head_dim]``."""
        found = _blocks(self.stored, tables)
        if self.format.storage is not None:
            scales = None if self.scales is None else _blocks(self.scales, tables)
            found = self.format.dequantize(found, scales, dtype)
        return found.flatten(2, 3)


def _blocks(paged: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """A copy of the blocks in some tables [S, W], of which ``flatten(2, 3)`` makes each one sequence's:
    [S, KV heads, W, block_size, ...]."""
    return paged.index_select(0, tables.flatten()).unflatten(0, tables.shape).transpose(1, 2)


@dataclass(frozen=True)
class TorchCache:
    """One layer's keys and values."""

    keys: Paged
    values: Paged
    kind: int


@dataclass(frozen=True)
class _Decodes:
    """Sequences with one query each: their rows in the batch, block tables padded to one width, and mask."""

    rows: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Prefill:
    """Up to QUERY_CHUNK_TOKENS consecutive queries of one sequence, with the table and mask of what they
    see."""

    start: int
    end: int
    table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Kind:
    """What layers of one kind share: rotary tables of the step's positions, and what its queries see."""

    cos: torch.Tensor
    sin: torch.Tensor
    decodes: list[_Decodes]
    prefills: list[_Prefill]


@dataclass(frozen=True)
class TorchStep:
    blocks: torch.Tensor
    offsets: torch.Tensor
    kinds: list[_Kind]


class TorchKernels(Kernels):
    """``cos`` and ``sin`` are the rotary tables, fp32, [kinds of layers, max_model_len, head_dim / 2]."""

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        cos: torch.Tensor,
        sin: torch.Tensor,
        int8: bool = False,
    ) -> None:
        self.shape, self.dtype, self._int8 = shape, dtype, int8
        self._cos, self._sin = (table.view(-1, *table.shape[-2:]) for table in (cos, sin))
        self._can_pack = torch.backends.mkldnn.is_available() and dtype == torch.bfloat16

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return Int8Linear(weight, bias) if self._int8 else self.pack_exact(weight, bias)

    def pack_exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        kind = PackedLinear if self._can_pack else TorchLinear
        return kind(weight, bias)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear | Int8Linear)
        out.copy_(linear(x))

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear | Int8Linear)
        out += linear(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if weight.dtype == self.dtype:
            torch.mul(weight, wide.to(self.dtype), out=out)
        else:
            out.copy_(wide * weight)

    def pack_norm(self, weight: torch.Tensor, offset: float) -> torch.Tensor:
        """With an offset in fp32: Gemma multiplies before it rounds, others round before they multiply."""
        packed = weight.float() + offset
        return packed if offset else packed.to(self.dtype)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def allocate_cache(self, num_blocks: int, kind: int = 0) -> TorchCache:
        keys, values = (Paged.allocate(self.shape, self.dtype, num_blocks) for _ in range(2))
        return TorchCache(keys, values, kind)

    def begin(self, batch: Batch) -> TorchStep:
        positions = torch.from_numpy(batch.positions).long()
        slots = torch.from_numpy(batch.slots).long()
        lengths = np.diff(batch.query_start)
        single, several = np.flatnonzero(lengths == 1).astype(np.int32), np.flatnonzero(lengths > 1)
        seen = {
            window: (
                self._decodes(batch, single, window),
                [piece for s in several for piece in self._prefill(batch, int(s), window)],
            )
            for window in set(self.shape.windows)
        }
        return TorchStep(
            blocks=slots // self.shape.block_size,
            offsets=slots % self.shape.block_size,
            kinds=[
                _Kind(self._cos[kind, positions, None], self._sin[kind, positions, None], *seen[window])
                for kind, window in enumerate(self.shape.windows)
            ],
        )

    def _decodes(self, batch: Batch, sequences: Int32, window: int | None) -> list[_Decodes]:
        """Group sequences of like length, so that little of a padded table is waste."""
        first = _first_key(batch.context_lens - 1, window) // self.shape.block_size
        widths = np.diff(batch.table_start) - first
        order = sequences[np.argsort(-widths[sequences], kind="stable")]
        block_bytes = 2 * self.shape.kv_size * self.shape.block_size * self.dtype.itemsize
        groups, start = [], 0
        while start < len(order):
            width = int(widths[order[start]])
            size = max(1, GATHER_BYTES // (width * block_bytes))
            groups.append(self._decode_group(batch, order[start : start + size], first, width, window))
            start += size
        return groups

    def _decode_group(
        self, batch: Batch, sequences: Int32, first: Int32, width: int, window: int | None
    ) -> _Decodes:
        """``first`` is, of every sequence of the batch, the first block that its query sees."""
        tables = np.zeros((len(sequences), width), dtype=np.int32)
        for row, s in enumerate(sequences):
            table = batch.tables[batch.table_start[s] + first[s] : batch.table_start[s + 1]]
            tables[row, : len(table)] = table
        start = first[sequences, None] * self.shape.block_size
        keys = start + np.arange(width * self.shape.block_size)
        mask = _visible(keys, batch.context_lens[sequences, None] - 1, window)
        return _Decodes(
            rows=torch.from_numpy(batch.query_start[sequences]).long(),
            tables=torch.from_numpy(tables),
            mask=torch.from_numpy(mask)[:, None, None, :],
        )

    def _prefill(self, batch: Batch, s: int, window: int | None) -> list[_Prefill]:
        first, last = int(batch.query_start[s]), int(batch.query_start[s + 1])
        table = batch.tables[batch.table_start[s] : batch.table_start[s + 1]]
        size, pieces = self.shape.block_size, []
        for start in range(first, last, QUERY_CHUNK_TOKENS):
            end = min(start + QUERY_CHUNK_TOKENS, last)
            positions = batch.positions[start:end]
            low = int(_first_key(positions[:1], window)[0]) // size
            high = int(positions[-1]) // size + 1
            mask = torch.from_numpy(
                _visible(np.arange(low * size, high * size, dtype=np.int32), positions[:, None], window)
            )
            pieces.append(
                _Prefill(start, end, torch.from_numpy(table[low:high]), mask.repeat(self.shape.group, 1))
            )
        return pieces

    def rope_and_store(self, qkv: torch.Tensor, cache: TorchCache, step: TorchStep) -> None:
        shape, kind = self.shape, step.kinds[cache.kind]
        q, k, v = qkv.split([shape.query_size, shape.kv_size, shape.kv_size], dim=-1)
        q.copy_(self._rotate(q, kind))
        for x, paged in ((self._rotate(k, kind), cache.keys), (v, cache.values)):
            paged.write(x.unflatten(-1, (-1, shape.head_dim)), step.blocks, step.offsets)

    def _rotate(self, x: torch.Tensor, kind: _Kind) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, self.shape.head_dim)).float()
        low, high = heads.chunk(2, dim=-1)
        turned = torch.cat((low * kind.cos - high * kind.sin, high * kind.cos + low * kind.sin), dim=-1)
        return turned.flatten(1).to(self.dtype)

    def attention(self, qkv: torch.Tensor, cache: TorchCache, step: TorchStep, out: torch.Tensor) -> None:
        shape, kind = self.shape, step.kinds[cache.kind]
        queries = qkv[:, : shape.query_size].unflatten(-1, (shape.num_kv_heads, shape.group, shape.head_dim))
        for group in kind.decodes:
            out[group.rows] = self._attend(queries[group.rows], cache, group.tables, group.mask).flatten(1)
        for piece in kind.prefills:
            # The heads of a group see the same keys, so they stand as further queries of their KV head.
            stacked = queries[piece.start : piece.end].permute(1, 2, 0, 3).flatten(1, 2)[None]
            found = self._attend(stacked, cache, piece.table[None], piece.mask)
            heads = found[0].unflatten(1, (shape.group, -1))
            out[piece.start : piece.end] = heads.permute(2, 0, 1, 3).flatten(1)

    def _attend(
        self, queries: torch.Tensor, cache: TorchCache, tables: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Queries [S, KV heads, N, head_dim] over what tables [S, W] hold, as far as the mask lets them."""
        keys, values = (half.gather(tables, self.dtype) for half in (cache.keys, cache.values))
        scale, cap = self.shape.scale, self.shape.softcap
        if cap is None:
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        scores = torch.matmul(queries, keys.transpose(-1, -2)).float().mul_(scale / cap).tanh_().mul_(cap)
        weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
        return torch.matmul(weights.to(self.dtype), values)

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """Of all steps of a layer, either the gathered context of attention or the copy of a product."""
        shape, size = self.shape, self.dtype.itemsize
        context = 2 * shape.kv_size * max_model_len * size
        # As stored, unless that is in the computed type; dequantised; and the transposed copy.
        copies = 2 if shape.kv_format.storage in (None, self.dtype) else 4
        gathered = copies * max(GATHER_BYTES, context)
        rows = shape.group * min(QUERY_CHUNK_TOKENS, max_tokens)
        mask = rows * max_model_len
        scores = 0 if shape.softcap is None else (4 + 4 + size) * shape.num_kv_heads * mask
        rotated = max_tokens * shape.query_size * (4 + 4 + size)
        return max(gathered + mask + scores, rotated)


def _first_key(positions: Int32, window: int | None) -> Int32:
    """The first key that a query at each position sees."""
    return np.maximum(positions - ((1 << 30) if window is None else window - 1), 0)


def _visible(keys: Int32, positions: Int32, window: int | None) -> NDArray[np.bool_]:
    """Whether a query at each position sees each key."""
    return (keys <= positions) & (keys >= _first_key(positions, window))
