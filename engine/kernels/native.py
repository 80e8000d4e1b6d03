"""The C++ kernels of cpp/ as the Kernels of base.py; where they cannot be built, cpu.py is used."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.kernels.base import AttentionShape, Batch, FusedLayers, Int32, Kernels, Linear
from engine.kernels.int8 import quantise_rows
from engine.kernels.native_library import (
    Layer,
    Model,
    NativeShape,
    NativeUnavailable,
    Spent,
    StepView,
    Weight,
    bind,
    load_library,
)

PANEL_COLUMNS = 48
"""Columns of a packed panel; as in cpp/linear.h."""
TASK_ROWS = 32
"""Query rows of an attention task; as in cpp/attention.h."""
LANES = 16
MAX_HEAD_DIM = 256
BYTES_IN_UNIT = 4


def supports(shape: AttentionShape, dtype: torch.dtype) -> None:
    """Raise NativeUnavailable where the kernels are turned off, or do not cover a model or block size."""
    if os.environ.get("VTUNE_NATIVE") == "0":
        raise NativeUnavailable("turned off by VTUNE_NATIVE=0")
    if dtype not in (torch.float32, torch.bfloat16):
        raise NativeUnavailable(f"no kernels for {dtype}")
    if not shape.is_plain:
        raise NativeUnavailable(
            "none for sliding windows, several kinds of layers, soft caps or KV formats of their own"
        )
    if shape.head_dim % (2 * LANES) or shape.head_dim > MAX_HEAD_DIM:
        raise NativeUnavailable(f"head_dim {shape.head_dim} is no multiple of {2 * LANES}, or too large")
    if shape.block_size % LANES:
        raise NativeUnavailable(f"block_size {shape.block_size} is no multiple of {LANES}")
    bind("linear", dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost memory and time only where they are written, in huge pages where the system has them:
    weights and blocks are read once per step, so with small pages many accesses would miss the page tables'
    cache."""
    region = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)


class NativeLinear(Linear):
    """A weight in panels (see cpp/linear.h), of the computed type or of int8 with scales and shifts."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scales: torch.Tensor | None = None,
    ) -> None:
        weight = weight.contiguous()
        self.out_features, self.in_features = weight.shape
        self.packed = _zeros(
            (-(-self.out_features // PANEL_COLUMNS) * PANEL_COLUMNS, self.in_features), weight.dtype
        )
        pack = load_library().pack_int8 if scales is not None else bind("pack", weight.dtype)
        sizes = self.out_features, self.in_features
        pack(ctypes.c_void_p(weight.data_ptr()), ctypes.c_void_p(self.packed.data_ptr()), *sizes)
        self.bias = None if bias is None else bias.float().contiguous()
        self.scales = None if scales is None else scales.flatten().contiguous()
        # Activations are bytes above 128, which every sum has once for each weight too much.
        self.shifts = None if scales is None else 128 * weight.sum(1, dtype=torch.int32)
        parts = [part for part in (self.bias, self.scales, self.shifts) if part is not None]
        self.nbytes = self.packed.nbytes + sum(part.nbytes for part in parts)
        self.view = Weight(
            self.packed.data_ptr(), _address(self.bias), _address(self.scales), _address(self.shifts), *sizes
        )
        self.address = ctypes.addressof(self.view)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@dataclass(frozen=True)
class NativeCache:
    """A layer's keys and values as cpp/attention.h has them: ``[blocks, KV heads, keys then values]``."""

    units: torch.Tensor

    @property
    def address(self) -> int:
        return self.units.data_ptr()


@dataclass(frozen=True)
class NativeStep:
    """The C view of a batch, and the arrays that it points into."""

    view: StepView
    arrays: tuple[Int32, ...]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.view)


class NativeKernels(Kernels):
    """``cos`` and ``sin`` are the rotary tables, fp32, [max_model_len, head_dim / 2].

    With ``int8`` linear layers are computed as int8.py has them, except those whose width is no multiple of
    4. Raises NativeUnavailable. Every tensor handed in must be contiguous.
    """

    def __init__(
        self,
        shape: AttentionShape,
        dtype: torch.dtype,
        cos: torch.Tensor,
        sin: torch.Tensor,
        int8: bool = False,
    ) -> None:
        supports(shape, dtype)
        self.shape, self.dtype, self.int8 = shape, dtype, int8
        self._tables = cos.contiguous(), sin.contiguous()
        self._cos, self._sin = (table.data_ptr() for table in self._tables)
        self._shape = NativeShape(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.scale
        )
        self._shape_address = ctypes.addressof(self._shape)
        self._linear, self._rms_norm = bind("linear", dtype), bind("rms_norm", dtype)
        self._silu_mul, self._attention = bind("silu_mul", dtype), bind("attention", dtype)
        self._rope_and_store = bind("rope_and_store", dtype)
        self._linear_int8 = bind("linear_int8", dtype) if int8 else None
        self._widest = 0

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        if not self.int8 or weight.shape[1] % BYTES_IN_UNIT:
            return self.pack_exact(weight, bias)
        self._widest = max(self._widest, weight.shape[1])
        quantised, scales = quantise_rows(weight)
        return NativeLinear(quantised, bias, scales)

    def pack_exact(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return NativeLinear(weight, bias)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._product(x, linear, out, add=False)

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._product(x, linear, out, add=True)

    def _product(self, x: torch.Tensor, linear: Linear, out: torch.Tensor, add: bool) -> None:
        assert isinstance(linear, NativeLinear)
        rows = x.shape[0]
        arguments = (x.data_ptr(), linear.address, out.data_ptr(), rows, add, out.dtype != self.dtype)
        if linear.scales is None:
            self._linear(*arguments)
        else:
            quantised, scales = torch.empty(x.shape, dtype=torch.uint8), torch.empty(rows)
            assert self._linear_int8 is not None
            self._linear_int8(*arguments, quantised.data_ptr(), scales.data_ptr())

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape)

    def allocate_cache(self, num_blocks: int, kind: int = 0) -> NativeCache:
        block = 2 * self.shape.block_size * self.shape.head_dim
        return NativeCache(_zeros((num_blocks, self.shape.num_kv_heads, block), self.dtype))

    def begin(self, batch: Batch) -> NativeStep:
        rows = np.diff(batch.query_start) * self.shape.group
        tasks = -(-rows // TASK_ROWS) * self.shape.num_kv_heads
        task_start = np.zeros(len(tasks) + 1, dtype=np.int32)
        np.cumsum(tasks, out=task_start[1:])
        arrays = (
            batch.positions,
            batch.slots,
            batch.query_start,
            batch.context_lens,
            batch.tables,
            batch.table_start,
            task_start,
        )
        addresses = (array.ctypes.data for array in arrays)
        return NativeStep(StepView(batch.num_tokens, batch.num_sequences, *addresses), arrays)

    def rope_and_store(self, qkv: torch.Tensor, cache: NativeCache, step: NativeStep) -> None:
        self._rope_and_store(
            qkv.data_ptr(), cache.address, self._cos, self._sin, self._shape_address, step.address
        )

    def attention(self, qkv: torch.Tensor, cache: NativeCache, step: NativeStep, out: torch.Tensor) -> None:
        self._attention(qkv.data_ptr(), out.data_ptr(), cache.address, self._shape_address, step.address)

    def fuse(self, layers: Sequence[Any], eps: float) -> FusedLayers | None:
        linears = [linear for layer in layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        kinds = {linear.scales is not None for linear in linears}
        plain = all(layer.head_norms is None and layer.output_norms is None for layer in layers)
        if not plain or len(kinds) != 1:
            return None
        model = Model(
            self._shape,
            linears[0].in_features,
            linears[3].in_features,
            len(layers),
            eps,
            self._cos,
            self._sin,
        )
        return NativeLayers(layers, model, self.dtype, int8=kinds.pop())

    def argmax(self, logits: torch.Tensor) -> list[int]:
        found = torch.empty(len(logits), dtype=torch.int64)
        load_library().argmax(
            ctypes.c_void_p(logits.data_ptr()), ctypes.c_void_p(found.data_ptr()), *logits.shape
        )
        tokens: list[int] = found.tolist()
        return tokens

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """Sums and weights live in registers and on the stack; only int8 activations are of a step's size."""
        return max_tokens * (self._widest + 4) if self._widest else 0


class NativeLayers:
    """All layers of a decoder in one call, with buffers of its own for the middle of a layer."""

    def __init__(self, layers: Sequence[Any], model: Model, dtype: torch.dtype, int8: bool) -> None:
        self._tensors = layers  # kept alive: the views point into them
        self._views = (Layer * len(layers))(
            *(
                Layer(
                    _address(layer.input_norm),
                    layer.qkv.view,
                    layer.o.view,
                    _address(layer.post_norm),
                    layer.gate_up.view,
                    layer.down.view,
                )
                for layer in layers
            )
        )
        self._model = model
        model.layers = ctypes.addressof(self._views)
        self._address = ctypes.addressof(model)
        suffix = "_int8" if int8 else ""
        self._run = bind(f"decoder{suffix}", dtype)
        size = bind(f"scratch_bytes{suffix}", dtype)(self._address)
        self._scratch = _zeros((size,), torch.uint8)
        self.nbytes = self._scratch.nbytes
        self.spent: Spent | None = None
        """Give it one to have it count, for benchmarks."""
        self._caches: Sequence[NativeCache] | None = None

    def __call__(self, step: NativeStep, caches: Sequence[NativeCache], workspace: Any) -> None:
        if caches is not self._caches:
            for view, cache in zip(self._views, caches, strict=True):
                view.cache = cache.address
            self._caches = caches
        self._run(
            self._address,
            step.address,
            workspace.hidden.data_ptr(),
            workspace.qkv.data_ptr(),
            workspace.attended.data_ptr(),
            self._scratch.data_ptr(),
            None if self.spent is None else ctypes.addressof(self.spent),
        )
