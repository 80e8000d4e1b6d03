"""The C++ kernels of native.cpp: compiled once with the machine's compiler, bound with ctypes.

They need Linux, x86-64 with AVX-512 (for bfloat16: AVX512-BF16) and g++ or clang++. Where any of these is
missing ``load_library`` says why, and the torch path of cpu.py is used. ``VTUNE_NATIVE=0`` turns them off.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.bundled import FetchError, cache_dir
from engine.kernels.base import AttentionShape, Batch, Int32, Kernels, Linear

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")
PANEL = 48
"""Columns of a packed panel; native.cpp's PANEL."""
TASK_ROWS = 32
"""Query rows of an attention task; native.cpp's TASK_ROWS."""
LANES = 16
MAX_HEAD_DIM = 256

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack": (_P, _P, _I, _I),
    "linear": (_P, _P, _P, _P, _I, _I, _I, _I, _I),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "silu_mul": (_P, _P, _I, _I),
    "rope_and_store": (_P, _P, _P, _P, _P, _P, _P),
    "attention": (_P, _P, _P, _P, _P, _P),
}


class NativeUnavailable(RuntimeError):
    """The C++ kernels cannot be had on this machine; the message says why."""


@cache
def load_library() -> ctypes.CDLL:
    """Compile (the first time) and load the kernels. Raises NativeUnavailable."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(f"written for Linux on x86-64, not {platform.system()} {platform.machine()}")
    features = _cpu_features()
    if not {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(features):
        raise NativeUnavailable("this CPU lacks AVX-512")
    compiler = shutil.which("g++") or shutil.which("clang++")
    key = hashlib.sha256("\n".join((SOURCE.read_text(), *FLAGS, *features)).encode()).hexdigest()[:16]
    try:
        library = cache_dir() / f"native-{key}.so"
    except FetchError as error:
        raise NativeUnavailable(str(error)) from None
    if not library.is_file():
        if compiler is None:
            raise NativeUnavailable("no C++ compiler (g++ or clang++) is installed")
        _compile(compiler, library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"{library} does not load: {error}") from None
    loaded.set_threads(torch.get_num_threads())
    return loaded


def _cpu_features() -> list[str]:
    """The CPU's feature names; the compiled file is valid for CPUs with the same ones."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return sorted(line.partition(":")[2].split())
    return []


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".native-") as folder:
            made = Path(folder) / library.name
            done = subprocess.run(
                [compiler, *FLAGS, "-o", str(made), str(SOURCE)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode != 0:
                errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
                raise NativeUnavailable(f"{compiler} does not compile them: {errors[0]}")
            os.replace(made, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot compile them: {error}") from None


class _Shape(ctypes.Structure):
    _fields_ = (("heads", _I), ("kv_heads", _I), ("head_dim", _I), ("block_size", _I), ("scale", _F))


class _Step(ctypes.Structure):
    _fields_ = (
        ("tokens", _I),
        ("sequences", _I),
        ("positions", _P),
        ("slots", _P),
        ("query_start", _P),
        ("context_lens", _P),
        ("tables", _P),
        ("table_start", _P),
        ("task_start", _P),
    )


class NativeLinear(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, pack: Callable[..., None]) -> None:
        weight = weight.contiguous()
        self.out_features, self.in_features = weight.shape
        padded = -(-self.out_features // PANEL) * PANEL
        self.packed = torch.empty(padded, self.in_features, dtype=weight.dtype)
        pack(weight.data_ptr(), self.packed.data_ptr(), self.out_features, self.in_features)
        self.bias = None if bias is None else bias.float().contiguous()
        self.address = self.packed.data_ptr()
        self.bias_address = None if self.bias is None else self.bias.data_ptr()
        self.nbytes = self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class NativeCache:
    """A layer's keys and values in native.cpp's layout: ``[blocks, KV heads, block_size * head_dim]``."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def addresses(self) -> tuple[int, int]:
        return self.keys.data_ptr(), self.values.data_ptr()


@dataclass(frozen=True)
class NativeStep:
    """The C view of a batch, and the arrays that it points into."""

    view: _Step
    arrays: tuple[Int32, ...]

    @property
    def address(self) -> int:
        return ctypes.addressof(self.view)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost memory and time only where they are written, in huge pages where the system has them:
    blocks lie scattered, so with small pages many an access would miss the page tables' cache."""
    region = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=dtype).view(shape)


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
    if not hasattr(load_library(), f"linear_{_name(dtype)}"):
        raise NativeUnavailable("this CPU lacks AVX512-BF16")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class NativeKernels(Kernels):
    """``cos`` and ``sin`` are the rotary tables, fp32, [max_model_len, head_dim / 2].

    Raises NativeUnavailable. Every tensor handed in must be contiguous.
    """

    def __init__(
        self, shape: AttentionShape, dtype: torch.dtype, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        supports(shape, dtype)
        self.shape, self.dtype = shape, dtype
        self._tables = cos.contiguous(), sin.contiguous()
        self._cos, self._sin = (table.data_ptr() for table in self._tables)
        self._shape = _Shape(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.scale
        )
        self._shape_address = ctypes.addressof(self._shape)
        library, name = load_library(), _name(dtype)
        bound = {}
        for operation, arguments in _SIGNATURES.items():
            bound[operation] = getattr(library, f"{operation}_{name}")
            bound[operation].argtypes, bound[operation].restype = arguments, None
        self._pack, self._linear = bound["pack"], bound["linear"]
        self._rms_norm, self._silu_mul = bound["rms_norm"], bound["silu_mul"]
        self._rope_and_store, self._attention = bound["rope_and_store"], bound["attention"]

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return NativeLinear(weight, bias, self._pack)

    def linear(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._product(x, linear, out, add=False)

    def linear_add(self, x: torch.Tensor, linear: Linear, out: torch.Tensor) -> None:
        self._product(x, linear, out, add=True)

    def _product(self, x: torch.Tensor, linear: Linear, out: torch.Tensor, add: bool) -> None:
        assert isinstance(linear, NativeLinear)
        self._linear(
            x.data_ptr(),
            linear.address,
            linear.bias_address,
            out.data_ptr(),
            x.shape[0],
            linear.out_features,
            linear.in_features,
            add,
            out.dtype != self.dtype,
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, eps)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), *out.shape)

    def allocate_cache(self, num_blocks: int, kind: int = 0) -> NativeCache:
        shape = (num_blocks, self.shape.num_kv_heads, self.shape.block_size * self.shape.head_dim)
        return NativeCache(_zeros(shape, self.dtype), _zeros(shape, self.dtype))

    def begin(self, batch: Batch) -> NativeStep:
        rows = np.diff(batch.query_start) * self.shape.group
        tasks = -(-rows // TASK_ROWS) * self.shape.num_kv_heads
        task_start = np.concatenate(([0], np.cumsum(tasks))).astype(np.int32)
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
        return NativeStep(_Step(batch.num_tokens, batch.num_sequences, *addresses), arrays)

    def rope_and_store(self, qkv: torch.Tensor, cache: NativeCache, step: NativeStep) -> None:
        keys, values = cache.addresses
        self._rope_and_store(
            qkv.data_ptr(), keys, values, self._cos, self._sin, self._shape_address, step.address
        )

    def attention(self, qkv: torch.Tensor, cache: NativeCache, step: NativeStep, out: torch.Tensor) -> None:
        keys, values = cache.addresses
        self._attention(qkv.data_ptr(), out.data_ptr(), keys, values, self._shape_address, step.address)

    def scratch_bytes(self, max_tokens: int, max_sequences: int, max_model_len: int) -> int:
        """Nothing of a step's size: sums and weights live in registers and on the stack."""
        return 0
