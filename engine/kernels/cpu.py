"""The torch path of the CPU: works everywhere, and is what the C++ kernels are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.base import AttentionShape, Batch, Int32, Kernels, Linear

PACKED_ROWS = 64
"""Up to so many rows oneDNN multiplies faster with a weight that it reordered ahead (1.5x at 1-16 rows)."""

GATHER_BYTES = 32 << 20
"""Decoding sequences are attended together in groups whose gathered keys and values stay below this."""

QUERY_CHUNK = 256
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
class TorchCache:
    """One layer's keys and values, each ``[blocks, KV heads, block_size, head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class _Decodes:
    """Sequences with one query each: their rows in the batch, block tables padded to one width, and mask."""

    rows: torch.Tensor
    tables: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class _Prefill:
    """Up to QUERY_CHUNK consecutive queries of one sequence, with the table and mask of what they see."""

    start: int
    end: int
    table: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class TorchStep:
    cos: torch.Tensor
    sin: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    decodes: list[_Decodes]
    prefills: list[_Prefill]


class TorchKernels(Kernels):
    """``cos`` and ``sin`` are the rotary tables, fp32, [max_model_len, head_dim / 2]."""

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._cos, self._sin = cos, sin
        self._can_pack = torch.backends.mkldnn.is_available() and dtype == torch.bfloat16

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        kind = PackedLinear if self._can_pack else TorchLinear
        return kind(weight, bias)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear)
        out.copy_(linear(x))

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear)
        out += linear(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        torch.mul(weight, wide.to(self.dtype), out=out)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)

    def allocate_cache(self, num_blocks: int) -> TorchCache:
        shape = (num_blocks, self.shape.num_kv_heads, self.shape.block_size, self.shape.head_dim)
        return TorchCache(torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype))

    def begin(self, batch: Batch) -> TorchStep:
        positions = torch.from_numpy(batch.positions).long()
        slots = torch.from_numpy(batch.slots).long()
        lengths = np.diff(batch.query_start)
        return TorchStep(
            cos=self._cos[positions].unsqueeze(1),
            sin=self._sin[positions].unsqueeze(1),
            blocks=slots // self.shape.block_size,
            offsets=slots % self.shape.block_size,
            decodes=self._decodes(batch, np.flatnonzero(lengths == 1).astype(np.int32)),
            prefills=[piece for s in np.flatnonzero(lengths > 1) for piece in self._prefill(batch, int(s))],
        )

    def _decodes(self, batch: Batch, sequences: Int32) -> list[_Decodes]:
        """Group sequences of like length, so that little of a padded table is waste."""
        widths = np.diff(batch.table_start)
        order = sequences[np.argsort(-batch.context_lens[sequences], kind="stable")]
        block_bytes = 2 * self.shape.kv_size * self.shape.block_size * self.dtype.itemsize
        groups, start = [], 0
        while start < len(order):
            width = int(widths[order[start]])
            size = max(1, GATHER_BYTES // (width * block_bytes))
            groups.append(self._decode_group(batch, order[start : start + size], width))
            start += size
        return groups

    def _decode_group(self, batch: Batch, sequences: Int32, width: int) -> _Decodes:
        tables = np.zeros((len(sequences), width), dtype=np.int32)
        for row, s in enumerate(sequences):
            table = batch.tables[batch.table_start[s] : batch.table_start[s + 1]]
            tables[row, : len(table)] = table
        columns = np.arange(width * self.shape.block_size)
        mask = columns[None, :] < batch.context_lens[sequences][:, None]
        return _Decodes(
            rows=torch.from_numpy(batch.query_start[sequences]).long(),
            tables=torch.from_numpy(tables),
            mask=torch.from_numpy(mask)[:, None, None, :],
        )

    def _prefill(self, batch: Batch, s: int) -> list[_Prefill]:
        first, last = int(batch.query_start[s]), int(batch.query_start[s + 1])
        table = batch.tables[batch.table_start[s] : batch.table_start[s + 1]]
        pieces = []
        for start in range(first, last, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, last)
            positions = batch.positions[start:end]
            width = int(positions[-1]) // self.shape.block_size + 1
            columns = np.arange(width * self.shape.block_size)
            mask = torch.from_numpy(columns[None, :] <= positions[:, None])
            pieces.append(
                _Prefill(start, end, torch.from_numpy(table[:width]), mask.repeat(self.shape.group, 1))
            )
        return pieces

    def rope_and_store(self, qkv: torch.Tensor, cache: TorchCache, step: TorchStep) -> None:
        shape = self.shape
        q, k, v = qkv.split([shape.query_size, shape.kv_size, shape.kv_size], dim=-1)
        q.copy_(self._rotate(q, step))
        # Indexing on both sides of a slice puts the indexed dimension first: [T, KV heads, head_dim].
        cache.keys[step.blocks, :, step.offsets] = self._rotate(k, step).unflatten(-1, (-1, shape.head_dim))
        cache.values[step.blocks, :, step.offsets] = v.unflatten(-1, (-1, shape.head_dim))

    def _rotate(self, x: torch.Tensor, step: TorchStep) -> torch.Tensor:
        heads = x.unflatten(-1, (-1, self.shape.head_dim)).float()
        low, high = heads.chunk(2, dim=-1)
        turned = torch.cat((low * step.cos - high * step.sin, high * step.cos + low * step.sin), dim=-1)
        return turned.flatten(1).to(self.dtype)

    def attention(self, qkv: torch.Tensor, cache: TorchCache, step: TorchStep, out: torch.Tensor) -> None:
        shape = self.shape
        queries = qkv[:, : shape.query_size].unflatten(-1, (shape.num_kv_heads, shape.group, shape.head_dim))
        for group in step.decodes:
            keys, values = (self._gather(half, group.tables) for half in (cache.keys, cache.values))
            found = F.scaled_dot_product_attention(
                queries[group.rows], keys, values, attn_mask=group.mask, scale=shape.scale
            )
            out[group.rows] = found.flatten(1)
        for piece in step.prefills:
            keys, values = (self._gather(half, piece.table[None]) for half in (cache.keys, cache.values))
            # The heads of a group see the same keys, so they stand as further queries of their KV head.
            stacked = queries[piece.start : piece.end].permute(1, 2, 0, 3).flatten(1, 2)[None]
            found = F.scaled_dot_product_attention(
                stacked, keys, values, attn_mask=piece.mask, scale=shape.scale
            )
            heads = found[0].unflatten(1, (shape.group, -1))
            out[piece.start : piece.end] = heads.permute(2, 0, 1, 3).flatten(1)

    def _gather(self, half: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Keys or values of some block tables [S, W]: ``[S, KV heads, W * block_size, head_dim]``."""
        blocks = half.index_select(0, tables.flatten()).unflatten(0, tables.shape)
        return blocks.transpose(1, 2).flatten(2, 3)

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """Of all steps of a layer, either the gathered context of attention or the copy of a product."""
        shape, size = self.shape, self.dtype.itemsize
        context = 2 * shape.kv_size * max_model_len * size
        gathered = 2 * max(GATHER_BYTES, context)  # index_select, then the transposed copy
        mask = shape.group * min(QUERY_CHUNK, max_tokens) * max_model_len
        rotated = max_tokens * shape.query_size * (4 + 4 + size)
        return max(gathered + mask, rotated)
