"""What this machine's cores can do at most; roofline.cpp, compiled with the flags of the engine's kernels."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engine.kernels.native_library import FLAGS

SOURCE = Path(__file__).with_name("roofline.cpp")
ROUNDS, REPEATS, MEGABYTES = 500_000, 5, 256


@dataclass(frozen=True)
class Roofline:
    """Per second, all threads together: operations of products in registers, and bytes read from memory."""

    bf16: float
    int8: float
    float32: float
    memory: float

    def describe(self) -> str:
        return (
            f"peak: {self.bf16 / 1e9:.0f} GFLOP/s in bf16, {self.int8 / 1e9:.0f} GOP/s in int8, "
            f"{self.float32 / 1e9:.0f} GFLOP/s in fp32; memory {self.memory / 1e9:.1f} GB/s"
        )


def measure_roofline(threads: int) -> Roofline:
    """The best of a few tries. Needs g++, AVX512-BF16 and AVX512-VNNI."""
    with tempfile.TemporaryDirectory(prefix="vtune-roofline-") as folder:
        made = Path(folder) / "roofline.so"
        subprocess.run(["g++", *FLAGS, "-o", str(made), str(SOURCE)], check=True)
        library = ctypes.CDLL(str(made))
    best = {}
    for name in ("peak_bf16", "peak_int8", "peak_float32", "read_memory"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        function.argtypes = (ctypes.c_int, ctypes.c_int if name == "read_memory" else ctypes.c_int64)
        size = MEGABYTES if name == "read_memory" else ROUNDS
        best[name.split("_")[-1]] = max(function(threads, size) for _ in range(REPEATS))
    return Roofline(**best)
