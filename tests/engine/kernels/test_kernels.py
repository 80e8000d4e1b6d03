"""The C++ kernels against the torch path and exact sums, over ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_batches import both, make_batch

from engine.kernels import make_kernels, native, native_library
from engine.kernels.base import AttentionShape
from engine.kernels.cpu import TorchKernels
from engine.kernels.native import NativeKernels, NativeUnavailable
from engine.kernels.native_library import load_library

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
SHAPES = {  # heads, KV heads, head_dim, block size
    "SmolLM2": (9, 3, 64, 16),
    "blocks of 32": (4, 2, 128, 32),
    "multi-head": (2, 2, 32, 16),
    "one KV head": (8, 1, 96, 48),
    "Gemma's width": (2, 1, 256, 16),
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    try:
        native.supports(AttentionShape(1, 1, 32, 16, 1.0), request.param)
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.mark.parametrize("name", SHAPES)
def test_rope_cache_and_attention(name: str, dtype: torch.dtype) -> None:
    """Five sequences with histories; chunks of many queries beside single ones, blocks in random order."""
    heads, kv_heads, head_dim, block_size = SHAPES[name]
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, head_dim**-0.5)
    reference, kernels = both(shape, dtype)
    past, now = [1, 37, 128, 63, 200], [50, 1, 17, 1, 3]
    free = np.random.default_rng(0).permutation(np.arange(1, 60)).tolist()
    tables = [[free.pop() for _ in range(-(-(a + b) // block_size))] for a, b in zip(past, now, strict=True)]
    caches = reference.allocate_cache(60), kernels.allocate_cache(60)
    torch.manual_seed(0)
    for starts, counts in (([0] * 5, past), (past, now)):
        batch = make_batch(tables, starts, counts, block_size)
        qkv = torch.randn(batch.num_tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
        outs = []
        for kernel, cache in zip((reference, kernels), caches, strict=True):
            own, out = qkv.clone(), torch.full((batch.num_tokens, heads * head_dim), torch.nan, dtype=dtype)
            step = kernel.begin(batch)
            kernel.rope_and_store(own, cache, step)
            kernel.attention(own, cache, step, out)
            outs.append((own[:, : shape.query_size], out))
        torch.testing.assert_close(outs[0][0], outs[1][0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        torch.testing.assert_close(outs[0][1], outs[1][1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 8, 9, 16, 100, 700])
@pytest.mark.parametrize(("columns", "inner"), [(48, 32), (97, 66), (480, 576), (10, 1536)])
def test_linear(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    kernels = both(AttentionShape(1, 1, 32, 16, 1.0), dtype)[1]
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    bias, before = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
    exact = x.double() @ weight.double().T
    size = exact.abs().max()
    plain, biased = kernels.pack(weight), kernels.pack(weight, bias)

    def error(out: torch.Tensor, expected: torch.Tensor) -> float:
        return float((out.double() - expected).abs().max() / size)

    wide = torch.empty(rows, columns)
    kernels.linear(x, plain, wide)
    assert error(wide, exact) < 5e-6
    out = torch.empty(rows, columns, dtype=dtype)
    kernels.linear(x, biased, out)
    assert error(out, exact + bias.double()) < TOLERANCE[dtype]
    out = before.clone()
    kernels.linear_add(x, plain, out)
    assert error(out, exact + before.double()) < TOLERANCE[dtype]


def test_a_row_s_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    kernels = both(AttentionShape(1, 1, 32, 16, 1.0), dtype)[1]
    x, linear = torch.randn(900, 576).to(dtype), kernels.pack(torch.randn(960, 576).to(dtype))
    whole = torch.empty(900, 960, dtype=dtype)
    kernels.linear(x, linear, whole)
    for start, end in ((0, 1), (5, 7), (100, 111), (300, 900)):
        part = torch.empty(end - start, 960, dtype=dtype)
        kernels.linear(x[start:end], linear, part)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("width", [32, 90, 576])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_row_wise_operations(rows: int, width: int, dtype: torch.dtype) -> None:
    reference, kernels = both(AttentionShape(1, 1, 32, 16, 1.0), dtype)
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    gate_up = (10 * torch.randn(rows, 2 * width)).to(dtype)
    gate_up[0, :4] = torch.tensor([-1e4, 1e4, -90.0, 0.0]).to(dtype)
    for operation in ("norm", "silu"):
        outs = [torch.empty(rows, width, dtype=dtype) for _ in range(2)]
        for kernel, out in zip((reference, kernels), outs, strict=True):
            if operation == "norm":
                kernel.rms_norm(x, weight, 1e-5, out)
            else:
                kernel.silu_mul(gate_up, out)
        torch.testing.assert_close(outs[0], outs[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_packed_oneDNN_weights_equal_plain_ones() -> None:
    shape = AttentionShape(1, 1, 32, 16, 1.0)
    kernels = TorchKernels(shape, torch.bfloat16, torch.ones(4, 16), torch.zeros(4, 16))
    weight = torch.randn(96, 64).bfloat16()
    linear = kernels.pack(weight)
    for rows in (1, 16, 64, 65):
        x, out = torch.randn(rows, 64).bfloat16(), torch.empty(rows, 96, dtype=torch.bfloat16)
        kernels.linear(x, linear, out)
        exact = x.double() @ weight.double().T
        assert (out.double() - exact).abs().max() / exact.abs().max() < 1e-2


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (AttentionShape(1, 1, 80, 16, 1.0), "head_dim 80"),
        (AttentionShape(1, 1, 512, 16, 1.0), "head_dim 512"),
        (AttentionShape(1, 1, 64, 8, 1.0), "block_size 8"),
    ],
)
def test_other_shapes_use_the_torch_path(shape: AttentionShape, reason: str) -> None:
    with pytest.raises(NativeUnavailable, match=reason):
        native.supports(shape, torch.float32)
    tables = torch.ones(4, shape.head_dim // 2)
    assert not isinstance(make_kernels(shape, torch.float32, tables, tables), NativeKernels)


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTUNE_NATIVE", "0")
    with pytest.raises(NativeUnavailable, match="VTUNE_NATIVE=0"):
        native.supports(AttentionShape(1, 1, 32, 16, 1.0), torch.float32)


@pytest.fixture
def fresh_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``load_library`` without what it found before, in an empty cache."""
    monkeypatch.setenv("VTUNE_CACHE", str(tmp_path))
    if not {"avx512f", "avx512bw"} <= set(native_library.cpu_features()):
        pytest.skip("this CPU lacks AVX-512")
    return load_library.__wrapped__


def test_without_a_compiler_it_says_so(fresh_load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        fresh_load()


def test_a_compiler_that_fails_is_quoted(
    fresh_load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'native.cpp:1: error: no luck' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(compiler))
    with pytest.raises(NativeUnavailable, match="error: no luck"):
        fresh_load()
    assert [path.name for path in tmp_path.glob("*native*")] == [".native.lock"]
