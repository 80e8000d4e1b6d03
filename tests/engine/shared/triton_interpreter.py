"""Import this before anything of ``engine.kernels.triton``: kernels run in Triton's interpreter, on the CPU.

Triton decides at its import whether it interprets, so the variable is set just for that moment; processes
that tests start do not inherit it.
"""

from __future__ import annotations

import importlib
import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
try:
    triton = pytest.importorskip("triton", reason="triton is for Linux only")
    # The interpreter imports it at the first launch, when it would ask for the variable again.
    importlib.import_module("triton.experimental.gluon")
    from engine.kernels.triton import (
        activation,
        attention,
        kernels,
        norm,
        quantise,
        random,
        rejection,
        rope,
        sampler,
        sampling,
    )
finally:
    del os.environ["TRITON_INTERPRET"]

if isinstance(quantise.widen, triton.JITFunction):
    raise RuntimeError("triton was imported before triton_interpreter: it would compile, not interpret")

__all__ = [
    "activation",
    "attention",
    "kernels",
    "norm",
    "quantise",
    "random",
    "rejection",
    "rope",
    "sampler",
    "sampling",
]
