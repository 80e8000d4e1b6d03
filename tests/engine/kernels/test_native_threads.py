"""The C++ kernels on several threads: what they store and compute is what one thread does, every time.

The other tests run on one thread, where nothing races.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels import native
from engine.kernels.base import AttentionShape
from engine.kernels.native_library import NativeUnavailable

HERE = Path(__file__).parent
STORED_AGAIN_AND_AGAIN = """
import sys
import torch
from engine.kernels.base import AttentionShape
from kernel_batches import both, make_batch

shape = AttentionShape(4, 2, 64, 16, 0.125)
_, kernels = both(shape, getattr(torch, sys.argv[1]))
torch.manual_seed(0)
batch = make_batch([[1, 2, 3, 4]], [1], [62], 16)  # from an odd token on, so that threads share pairs of them
qkv = torch.randn(batch.num_tokens, shape.query_size + 2 * shape.kv_size).to(getattr(torch, sys.argv[1]))

def attended():
    cache, own = kernels.allocate_cache(6), qkv.clone()
    out = torch.empty(batch.num_tokens, shape.query_size, dtype=qkv.dtype)
    step = kernels.begin(batch)
    kernels.rope_and_store(own, cache, step)
    kernels.attention(own, cache, step, out)
    return out

first = attended()
print(torch.get_num_threads(), sum(not torch.equal(attended(), first) for _ in range(1500)))
"""


def with_two_threads(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, timeout=240
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_that_threads_store_side_by_side_are_all_there(dtype: str) -> None:
    """In bfloat16 the values of two tokens share a word: storing one must not write the other back."""
    try:
        native.supports(AttentionShape(4, 2, 64, 16, 0.125), getattr(torch, dtype))
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    done = with_two_threads("-c", STORED_AGAIN_AND_AGAIN, dtype)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 0\n", "")


def test_every_operation_on_two_threads() -> None:
    files = [str(HERE / name) for name in ("test_kernels.py", "test_native_layers.py")]
    done = with_two_threads("-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout
