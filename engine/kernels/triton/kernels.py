"""The seam of kernels/base.py on a GPU: BLAS for products, Triton for everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from engine.kernels.base import AttentionShape, Batch, Int32, Kernels, Linear
from engine.kernels.cpu import Paged, TorchCache, TorchLinear
from engine.kernels.device import idle_batch
from engine.kernels.triton.activation import gate_mul
from engine.kernels.triton.attention import (
    MAX_SEGMENTS,
    Ragged,
    Tiles,
    attention,
    long_tiling,
    num_segments,
    short_tiling,
)
from engine.kernels.triton.graphs import CudaRecorder, LayerGraphs, Recorder
from engine.kernels.triton.norm import rms_norm
from engine.kernels.triton.rope import rope_and_store

ALIGNED = 4
"""Numbers in 16 bytes."""


@dataclass(frozen=True)
class TritonStep:
    """A batch on the device, and the tiles that its queries are attended in."""

    positions: torch.Tensor
    slots: torch.Tensor
    batch: Ragged
    short: Tiles
    long: Tiles
    captured: int = 0
    """The size of the captured graph that the step is padded to; 0: it is launched operation by operation."""


class TritonKernels(Kernels):
    """``cos`` and ``sin`` are the rotary tables, fp32, [kinds, max_model_len, head_dim / 2].

    ``capture_sizes``: steps in which every sequence computes one token are padded to the next of these sizes,
    and their layers recorded once for each. ``record`` records them; None: as CUDA graphs.
    """

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        cos: torch.Tensor,
        sin: torch.Tensor,
        device: torch.device,
        capture_sizes: Sequence[int] = (),
        record: Recorder | None = None,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._cos, self._sin = (table.to(device).contiguous() for table in (cos, sin))
        self._max_model_len = cos.shape[1]
        self._short, self._long = short_tiling(shape, dtype.itemsize), long_tiling(shape, dtype.itemsize)
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 16
        self._widest = 0
        self._graphs = None
        if capture_sizes:
            blocks = -(-self._max_model_len // shape.block_size)
            self._graphs = LayerGraphs(capture_sizes, blocks, device, record or CudaRecorder())

    def upload(self, numbers: Sequence[int] | Int32) -> torch.Tensor:
        return self._pinned(numbers).to(self.device, non_blocking=True)

    def _pinned(self, numbers: Sequence[int] | Int32) -> torch.Tensor:
        """In host memory that the device copies from by itself. It is not reused before a copy is over: its
        allocator keeps track of the streams."""
        host = torch.from_numpy(np.asarray(numbers, dtype=np.int32))
        return host.pin_memory() if self.device.type == "cuda" else host

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        self._widest = max(self._widest, len(weight))
        return TorchLinear(weight.to(self.device), None if bias is None else bias.to(self.device))

    def pack_norm(self, weight: torch.Tensor, offset: float) -> torch.Tensor:
        # With an offset in fp32, as the model was trained; a clone, so that the weight may be freed.
        wide = weight.to(self.device, torch.float32) + offset
        return wide if offset else wide.to(self.dtype)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear)
        if out.dtype != x.dtype:
            out.copy_(F.linear(x, linear.weight, linear.bias))
        elif linear.bias is None:
            torch.mm(x, linear.weight.t(), out=out)
        else:
            torch.addmm(linear.bias, x, linear.weight.t(), out=out)

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        assert isinstance(linear, TorchLinear)
        out.addmm_(x, linear.weight.t())
        if linear.bias is not None:
            out += linear.bias

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        rms_norm(x, weight, eps, out)

    def norm_heads(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> None:
        sizes = [self.shape.query_size, self.shape.kv_size, self.shape.kv_size]
        for part, weight in zip(qkv.split(sizes, dim=-1), (q_weight, k_weight), strict=False):
            heads = part.unflatten(-1, (-1, self.shape.head_dim))
            rms_norm(heads, weight, eps, heads)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate_mul(gate_up, out, "silu")

    def gelu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        gate_mul(gate_up, out, "gelu_tanh")

    def allocate_cache(self, num_blocks: int, kind: int = 0) -> TorchCache:
        keys, values = (Paged.allocate(self.shape, self.dtype, num_blocks, self.device) for _ in range(2))
        return TorchCache(keys, values, kind)

    def begin(self, batch: Batch) -> TritonStep:
        """One copy to the device: all of a step's numbers lie in one array. The block tables are its end, so
        that what is before them is at the same place for every step of a size."""
        lengths = np.diff(batch.query_start)
        size = 0
        if self._graphs is not None and (lengths == 1).all():
            size = self._graphs.size_for(batch.num_sequences)
        if size:
            batch = _pad(batch, size)
            lengths = np.diff(batch.query_start)
        short = (lengths > 0) & (lengths <= self._short.tokens(self.shape.group))
        tiles = [
            _tiles(batch.query_start, np.flatnonzero(chosen), tiling.tokens(self.shape.group))
            for chosen, tiling in ((short, self._short), (~short & (lengths > 0), self._long))
        ]
        sections = [
            batch.positions,
            batch.slots,
            batch.query_start,
            batch.context_lens,
            batch.table_start,
            *tiles[0],
            *tiles[1],
            batch.tables,
        ]
        flat = self._pinned(_joined(sections))
        if self._graphs is not None and size:
            flat = self._graphs.place(flat)
        else:
            flat = flat.to(self.device, non_blocking=True)
        positions, slots, query_start, contexts, table_start, *where, tables = _cut(flat, sections)
        longest = self._max_model_len if size else int(batch.context_lens.max(initial=0))
        segments = num_segments(len(tiles[0][0]), self.shape, self._processors, longest, self._short)
        return TritonStep(
            positions,
            slots,
            Ragged(query_start, contexts, tables, table_start),
            Tiles(where[0], where[1], self._short, segments),
            Tiles(where[2], where[3], self._long),
            size,
        )

    def warm_up(self, caches: Sequence[TorchCache]) -> int:
        """Compile attention for every number of segments: steps choose by their lengths."""
        step, shape = self.begin(idle_batch(1, 1)), self.shape
        qkv = torch.zeros(1, shape.query_size + 2 * shape.kv_size, dtype=self.dtype, device=self.device)
        out = torch.empty(1, shape.query_size, dtype=self.dtype, device=self.device)
        variants = [1 << power for power in range(MAX_SEGMENTS.bit_length())]
        kinds = {cache.kind: cache for cache in caches}
        for cache in kinds.values():
            for segments in variants:
                attention(qkv, cache, step.batch, replace(step.short, segments=segments), out, shape)
        return len(variants) * len(kinds)

    def run(
        self, step: TritonStep, tokens: int, layers: Callable[[int], None], recordable: bool = True
    ) -> None:
        if self._graphs is not None and step.captured and recordable:
            self._graphs.run(step.captured, partial(layers, step.captured))
        else:
            layers(step.captured or tokens)

    def rope_and_store(self, qkv: torch.Tensor, cache: TorchCache, step: TritonStep) -> None:
        cos, sin = self._cos[cache.kind], self._sin[cache.kind]
        rope_and_store(qkv, cache, step.positions, step.slots, cos, sin, self.shape)

    def attention(self, qkv: torch.Tensor, cache: TorchCache, step: TritonStep, out: torch.Tensor) -> None:
        for tiles in (step.short, step.long):
            attention(qkv, cache, step.batch, tiles, out, self.shape)

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """The segments' partial sums, and logits before they are widened to fp32."""
        programs = 4 * max(self._processors, MAX_SEGMENTS)
        partial = programs * self._short.rows * 4 * (2 * self.shape.head_dim + 2)
        return max(partial, max_sequences * self._widest * self.dtype.itemsize)


def _pad(batch: Batch, size: int) -> Batch:
    """Sequences of one token each, up to ``size``, that read nothing and write nowhere."""
    missing = size - batch.num_sequences

    def extend(array: Int32, fill: int) -> Int32:
        return np.concatenate((array, np.full(missing, fill, dtype=np.int32)))

    return Batch(
        positions=extend(batch.positions, 0),
        slots=extend(batch.slots, -1),
        query_start=np.arange(size + 1, dtype=np.int32),
        context_lens=extend(batch.context_lens, 0),
        tables=batch.tables,
        table_start=extend(batch.table_start, int(batch.table_start[-1])),
    )


def _tiles(query_start: Int32, sequences: NDArray[np.intp], tokens: int) -> tuple[Int32, Int32]:
    """Sequence and first query of each tile of ``tokens`` queries, or what is left of them."""
    starts = query_start[sequences]
    counts = -(-(query_start[sequences + 1] - starts) // tokens)
    which = np.repeat(np.arange(len(sequences)), counts)
    place = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return sequences[which].astype(np.int32), (starts[which] + place * tokens).astype(np.int32)


def _starts(sections: Sequence[Int32]) -> list[int]:
    """Where each array begins when they are laid one after the other, and the end of all. Begins are
    multiples of 16 bytes: Triton compiles a kernel anew for pointers that are aligned otherwise."""
    ends = np.cumsum([0, *(-(-len(section) // ALIGNED) * ALIGNED for section in sections)])
    starts: list[int] = ends.tolist()
    return starts


def _joined(sections: Sequence[Int32]) -> Int32:
    """The arrays in one."""
    *starts, end = _starts(sections)
    joined = np.zeros(end, dtype=np.int32)
    for start, section in zip(starts, sections, strict=True):
        joined[start : start + len(section)] = section
    return joined


def _cut(flat: torch.Tensor, sections: Sequence[Int32]) -> list[torch.Tensor]:
    """What ``_joined`` made one, as views. The last goes on to the end of ``flat``: in an idle step it is
    empty, and an empty view has no address that a graph could keep for later steps."""
    starts = _starts(sections)[:-1]
    views = [flat[start : start + len(section)] for start, section in zip(starts, sections, strict=True)]
    return [*views[:-1], flat[starts[-1] :]]
