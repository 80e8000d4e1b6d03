"""The row-wise kernels, and rope with the cache write, in Triton's interpreter against plain fp32 torch."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import activation, norm, quantise, rope

from engine.kernels.base import AttentionShape
from engine.kernels.cpu import Paged, TorchCache
from engine.kv.kv_format import KV_FORMATS, KVFormat

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 1), (3, 90), (2, 576), (1, 2048)])
def test_rms_norm(rows: int, width: int, with_residual: bool, wide_weight: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x = torch.randn(rows, 2 * width).to(dtype)[:, :width]
    weight = torch.randn(width) if wide_weight else torch.randn(width).to(dtype)
    residual = torch.randn(rows, width).to(dtype) if with_residual else None
    expected, total = norm.rms_norm_reference(x, weight, 1e-5, residual)
    out = torch.empty(rows, width, dtype=dtype)
    norm.rms_norm(x, weight, 1e-5, out, residual)
    close(out, expected, dtype)
    if residual is not None:
        close(residual, total, dtype)


@DTYPES
def test_norm_of_heads_in_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 200).to(dtype), torch.randn(80).to(dtype)
    expected, _ = norm.rms_norm_reference(x[:, :160].unflatten(1, (2, 80)), weight, 1e-6)
    beside, heads = x[:, 160:].clone(), x[:, :160].unflatten(1, (2, 80))
    norm.rms_norm(heads, weight, 1e-6, heads)
    close(heads, expected, dtype)
    assert torch.equal(x[:, 160:], beside)


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 90), (2, 1536)])
def test_gate(rows: int, width: int, kind: activation.Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = 4 * torch.randn(rows, 2 * width)
    if rows > 1:
        gate_up[0, :4] = torch.tensor([-2e3, 2e3, -90.0, 0.0])
    gate_up = gate_up.to(dtype)
    out = torch.empty(rows, width, dtype=dtype)
    activation.gate_mul(gate_up, out, kind)
    close(out, activation.gate_mul_reference(gate_up, kind), dtype)


@DTYPES
@pytest.mark.parametrize("kv_format", KV_FORMATS.values(), ids=lambda kv_format: kv_format.name)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(3, 1, 64, 16), (4, 2, 80, 32), (2, 2, 8, 16)]
)
def test_rope_and_store(
    heads: int, kv_heads: int, head_dim: int, block_size: int, kv_format: KVFormat, dtype: torch.dtype
) -> None:
    """Scattered slots, and a padded row that has none."""
    shape = AttentionShape(heads, kv_heads, head_dim, block_size, 1.0, kv_format=kv_format)
    torch.manual_seed(0)
    angles = 10 * torch.rand(300, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    qkv = torch.randn(6, shape.query_size + 2 * shape.kv_size).to(dtype)
    qkv[4] = 0.0
    positions = torch.tensor([0, 7, 299, 31, 3, 0], dtype=torch.int32)
    offsets = [3 * block_size + 5, block_size, 2 * block_size - 1, 0, 1, -1]
    slots = torch.tensor(offsets, dtype=torch.int32)
    halves = [Paged.allocate(shape, dtype, 4) for _ in range(4)]
    found, expected = (TorchCache(keys, values, kind=0) for keys, values in (halves[:2], halves[2:]))
    queries = rope.rope_and_store_reference(qkv, expected, positions, slots, cos, sin, shape)
    untouched = qkv[5].clone()
    rope.rope_and_store(qkv, found, positions, slots, cos, sin, shape)
    close(qkv[:5, : shape.query_size], queries[:5].flatten(1), dtype)
    assert torch.equal(qkv[5], untouched)
    for half, wanted in ((found.keys, expected.keys), (found.values, expected.values)):
        if wanted.scales is not None:
            torch.testing.assert_close(half.scales, wanted.scales)
        if wanted.stored.itemsize > 1:
            close(half.stored, wanted.stored.to(dtype).float(), wanted.stored.dtype)
            continue
        # A product that rounds the other way may move a number that lies between two codes by one.
        steps = _order(half.stored) - _order(wanted.stored)
        assert steps.abs().max() <= 1
        assert (steps != 0).float().mean() < 0.01


def _order(stored: torch.Tensor) -> torch.Tensor:
    """8-bit codes as whole numbers in the order of their values."""
    if stored.dtype == torch.int8:
        return stored.int()
    codes = stored.view(torch.uint8).int()
    return torch.where(codes >= 0x80, -(codes & 0x7F), codes)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_equals_torch(dtype: torch.dtype) -> None:
    """Every number, what lies half-way between two, its neighbours, and what saturates."""
    largest = torch.finfo(dtype).max
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers <= largest]
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = [numbers, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e9))]
    x = torch.cat([*around, torch.tensor([1.001 * largest, 1e7, 1e-12])])
    x = torch.cat([x, -x])
    codes, back = torch.zeros(len(x), dtype=torch.uint8), torch.zeros(len(x))
    quantise.round_trip[(1,)](x, codes, back, len(x), KV=quantise.CODES[dtype], BLOCK=1024)
    expected = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(back, expected.float())
    assert torch.equal(codes[x != 0], expected.view(torch.uint8)[x != 0])
