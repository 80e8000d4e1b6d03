"""Rotary embedding fused with the write into the paged cache, which quantises where the cache is 8-bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.base import AttentionShape
from engine.kernels.cpu import TorchCache
from engine.kernels.triton.quantise import code_of, encode, scale_of


@triton.jit
def _rotate(low, high, cos, sin):
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _store(
    cache, scales, row, low, high, columns, inside, HALF: tl.constexpr, KV: tl.constexpr, SCALED: tl.constexpr
):
    """Write one head's vector, given as its two halves, to row ``row`` of the cache."""
    place = cache + row * (2 * HALF) + columns
    if KV == 0:
        tl.store(place, low.to(cache.dtype.element_ty), mask=inside)
        tl.store(place + HALF, high.to(cache.dtype.element_ty), mask=inside)
    else:
        if SCALED:
            scale = scale_of(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0), KV)
            tl.store(scales + row, scale)
            low, high = low / scale, high / scale
        tl.store(place, encode(low, KV), mask=inside)
        tl.store(place + HALF, encode(high, KV), mask=inside)


@triton.jit
def _rope_and_store(
    qkv,
    positions,
    slots,
    cos_table,
    sin_table,
    keys,
    values,
    key_scales,
    value_scales,
    qkv_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One token, one KV head, and the query heads that share it."""
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:  # a padded row of a captured graph has none
        columns = tl.arange(0, HALF_BLOCK)
        inside = columns < HALF
        angle = tl.load(positions + token).to(tl.int64) * HALF + columns
        cos = tl.load(cos_table + angle, mask=inside, other=0.0)
        sin = tl.load(sin_table + angle, mask=inside, other=0.0)
        heads = tl.arange(0, GROUP_BLOCK)
        queries = (
            qkv + token * qkv_stride + (kv_head * GROUP + heads[:, None]) * (2 * HALF) + columns[None, :]
        )
        mask = (heads < GROUP)[:, None] & inside[None, :]
        low = tl.load(queries, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(queries + HALF, mask=mask, other=0.0).to(tl.float32)
        low, high = _rotate(low, high, cos[None, :], sin[None, :])
        tl.store(queries, low.to(qkv.dtype.element_ty), mask=mask)
        tl.store(queries + HALF, high.to(qkv.dtype.element_ty), mask=mask)

        row = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        key = qkv + token * qkv_stride + (KV_HEADS * GROUP + kv_head) * (2 * HALF) + columns
        low = tl.load(key, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(key + HALF, mask=inside, other=0.0).to(tl.float32)
        low, high = _rotate(low, high, cos, sin)
        low, high = low.to(qkv.dtype.element_ty).to(tl.float32), high.to(qkv.dtype.element_ty).to(tl.float32)
        _store(keys, key_scales, row, low, high, columns, inside, HALF, KV, SCALED)
        value = key + KV_HEADS * (2 * HALF)
        low = tl.load(value, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(value + HALF, mask=inside, other=0.0).to(tl.float32)
        _store(values, value_scales, row, low, high, columns, inside, HALF, KV, SCALED)


def pointers(cache: TorchCache) -> tuple[torch.Tensor, ...]:
    """Keys, values, and their scales; without scales, something in their place that is not read."""
    halves = cache.keys, cache.values
    scales = (half.stored if half.scales is None else half.scales for half in halves)
    return cache.keys.stored, cache.values.stored, *scales


def rope_and_store(
    qkv: torch.Tensor,
    cache: TorchCache,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: AttentionShape,
) -> None:
    """Rotate q in place; write rotated k, and v, to each token's slot (a negative slot: to none).

    ``qkv`` [T, (H + 2G) * D]; ``positions`` and ``slots`` int32 [T];
    ``cos`` and ``sin`` fp32 [positions, D / 2].
    """
    if not len(qkv):
        return
    half = shape.head_dim // 2
    _rope_and_store[(len(qkv), shape.num_kv_heads)](
        qkv,
        positions,
        slots,
        cos,
        sin,
        *pointers(cache),
        qkv.stride(0),
        KV_HEADS=shape.num_kv_heads,
        GROUP=shape.group,
        GROUP_BLOCK=triton.next_power_of_2(shape.group),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        BLOCK_SIZE=shape.block_size,
        KV=code_of(shape.kv_format),
        SCALED=shape.kv_format.scaled,
        num_warps=2 if shape.group * half <= 512 else 4,
        enable_fp_fusion=True,
    )


def rope_and_store_reference(
    qkv: torch.Tensor,
    cache: TorchCache,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    shape: AttentionShape,
) -> torch.Tensor:
    """The rotated queries [T, H, D] in fp32; writes ``cache``."""
    q, k, v = (
        part.unflatten(-1, (-1, shape.head_dim)).float()
        for part in qkv.split([shape.query_size, shape.kv_size, shape.kv_size], dim=-1)
    )
    turn = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    kept = slots >= 0
    where = slots[kept].long() // shape.block_size, slots[kept].long() % shape.block_size
    cache.keys.write(_rotate_reference(k, *turn)[kept].to(qkv.dtype), *where)
    cache.values.write(v[kept].to(qkv.dtype), *where)
    return _rotate_reference(q, *turn)


def _rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
