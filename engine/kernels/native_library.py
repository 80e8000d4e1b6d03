"""The C++ kernels of cpp/: compiled once with the machine's compiler, and loaded; their C structures.

They need Linux, x86-64 with AVX-512 (for bfloat16: AVX512-BF16, for int8: AVX512-VNNI) and g++ or clang++.
``VTUNE_NATIVE=0`` turns them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.cache import FetchError, cache_dir, locked

logger = logging.getLogger("vtune.kernels")

SOURCES = tuple(sorted(Path(__file__).with_name("cpp").glob("*.*")))
MAIN = Path(__file__).with_name("cpp") / "kernels.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-pthread")

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class NativeUnavailable(RuntimeError):
    """The C++ kernels cannot be had on this machine; the message says why."""


class NativeShape(ctypes.Structure):
    _fields_ = (("heads", _I), ("kv_heads", _I), ("head_dim", _I), ("block_size", _I), ("scale", _F))


class StepView(ctypes.Structure):
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


class Weight(ctypes.Structure):
    _fields_ = (("packed", _P), ("bias", _P), ("scales", _P), ("shifts", _P), ("n", _I), ("k", _I))


class Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", _P),
        ("qkv", Weight),
        ("o", Weight),
        ("post_norm", _P),
        ("gate_up", Weight),
        ("down", Weight),
        ("cache", _P),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("shape", NativeShape),
        ("hidden", _I),
        ("intermediate", _I),
        ("num_layers", _I),
        ("eps", _F),
        ("cos", _P),
        ("sin", _P),
        ("layers", _P),
    )


class Spent(ctypes.Structure):
    """Ticks of the processor's clock, summed over threads."""

    _fields_ = (("linear", ctypes.c_int64), ("attention", ctypes.c_int64), ("row_wise", ctypes.c_int64))


SIGNATURES: dict[str, tuple[Any, ...]] = {
    "pack": (_P, _P, _I, _I),
    "linear": (_P, _P, _P, _I, _I, _I),
    "linear_int8": (_P, _P, _P, _I, _I, _I, _P, _P),
    "rms_norm": (_P, _P, _P, _I, _I, _F),
    "silu_mul": (_P, _P, _I, _I),
    "rope_and_store": (_P, _P, _P, _P, _P, _P),
    "attention": (_P, _P, _P, _P, _P),
    "decoder": (_P, _P, _P, _P, _P, _P, _P),
    "decoder_int8": (_P, _P, _P, _P, _P, _P, _P),
    "scratch_bytes": (_P,),
    "scratch_bytes_int8": (_P,),
}
"""Arguments of the functions that exist for each type; see the end of kernels.cpp."""


@cache
def load_library() -> ctypes.CDLL:
    """Compile (the first time) and load the kernels. Raises NativeUnavailable."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(f"written for Linux on x86-64, not {platform.system()} {platform.machine()}")
    features = cpu_features()
    if not {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= set(features):
        raise NativeUnavailable("this CPU lacks AVX-512")
    compiler = shutil.which("g++") or shutil.which("clang++")
    texts = [source.read_text(encoding="utf-8") for source in SOURCES]
    key = hashlib.sha256("\n".join((*texts, *FLAGS, *features)).encode()).hexdigest()[:16]
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


def bind(name: str, dtype: torch.dtype) -> Any:
    """A function of SIGNATURES for ``dtype``. Raises NativeUnavailable where this CPU lacks what it needs."""
    kind = str(dtype).removeprefix("torch.")
    function = getattr(load_library(), f"{name}_{kind}", None)
    if function is None:
        raise NativeUnavailable(f"this CPU lacks {'AVX512-VNNI' if 'int8' in name else 'AVX512-BF16'}")
    function.argtypes = SIGNATURES[name]
    function.restype = ctypes.c_size_t if name.startswith("scratch_bytes") else None
    return function


def cpu_features() -> list[str]:
    """The CPU's feature names; the compiled file is valid for CPUs with the same ones."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return sorted(line.partition(":")[2].split())
    return []


def _compile(compiler: str, library: Path) -> None:
    """Make ``library``, unless another process has made it meanwhile."""
    cache = library.parent
    waiting = "another process is compiling the C++ kernels; waiting for it"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / ".native.lock", lambda: logger.info(waiting)):
            if library.is_file():
                return
            for stale in cache.glob(".native-*"):  # left by a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=cache, prefix=".native-") as folder:
                made = Path(folder) / library.name
                done = subprocess.run(
                    [compiler, *FLAGS, "-o", str(made), str(MAIN)],
                    capture_output=True,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                    timeout=300,
                    check=False,
                    env={**os.environ, "TMPDIR": folder},  # its own files go where ours do
                )
                if done.returncode != 0:
                    errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
                    raise NativeUnavailable(f"{compiler} does not compile them: {errors[0]}")
                os.replace(made, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"cannot compile them: {error}") from None
