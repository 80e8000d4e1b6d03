"""8-bit keys and values: the conversions that the cache kernels share. ``KVFormat`` is what they must equal.

Those of fp8 are written in integer arithmetic: one path for every device, those without fp8 instructions
(sm_80) and those whose e4m3 is another one (gfx942) included. Codes are bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kv.kv_format import KVFormat

CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""How a cache stores numbers: the constexpr ``KV`` of the kernels; 0: in a type that needs no conversion."""


def code_of(kv_format: KVFormat) -> int:
    return CODES.get(kv_format.storage, 0) if kv_format.storage is not None else 0


@triton.jit
def round_half_even(x):
    """fp32 to the nearest whole number, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode_e4m3(x):
    """fp32 to the byte of the nearest e4m3 (ties to even), saturating at 448.

    2^-120 moves e4m3's exponent bias (7) to fp32's (127), so that the last 20 bits of the fraction are to be
    rounded away; a carry out of the fraction increments the exponent, as it should.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6 the steps are even: round to multiples of 2^-9, whose count is the code.
    small = round_half_even(tl.minimum(magnitude, 0.015625) * 512.0).to(tl.int32)
    bits = (magnitude * 7.52316384526264e-37).to(tl.int32, bitcast=True)
    large = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    code = tl.where(magnitude < 0.015625, small, large)
    return tl.where(x < 0.0, code | 0x80, code).to(tl.uint8)


@triton.jit
def decode_e4m3(code):
    """The byte of an e4m3 to fp32: its bits as an fp16's, whose exponent bias is larger by 8."""
    wide = code.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def encode_e5m2(x):
    """fp32 to the byte of the nearest e5m2 (ties to even), saturating at 57344: the upper half of an fp16.

    Rounding twice, to fp16 and then to 2 bits, could err where the first lands on a tie; so the fp32 bits are
    rounded, and fp16's subnormal range by adding a number whose last bit is worth 2^-16.
    """
    magnitude = tl.minimum(tl.abs(x), 57344.0)
    small = round_half_even(tl.minimum(magnitude, 6.103515625e-05) * 65536.0).to(tl.int32)
    bits = (magnitude * 1.925929944387236e-34).to(tl.int32, bitcast=True)
    large = (bits + 0xFFFFF + ((bits >> 21) & 1)) >> 21
    code = tl.where(magnitude < 6.103515625e-05, small, large)
    return tl.where(x < 0.0, code | 0x80, code).to(tl.uint8)


@triton.jit
def decode_e5m2(code):
    return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(largest, KV: tl.constexpr):
    """The scale of a vector whose largest magnitude, ``largest``, int8's 127 or e4m3's 448 stands for."""
    return tl.maximum(largest / (127.0 if KV == 1 else 448.0), 1e-12)


@triton.jit
def encode(x, KV: tl.constexpr):
    """Codes of fp32 numbers, which were divided by their scale if there is one."""
    if KV == 1:
        codes = round_half_even(x).to(tl.int8)
    elif KV == 2:
        codes = encode_e4m3(x)
    else:
        codes = encode_e5m2(x)
    return codes


@triton.jit
def widen(codes, KV: tl.constexpr, dtype: tl.constexpr):
    """Codes as numbers of ``dtype``, before their scale. Every int8 and fp8 is exact in fp16 and bf16."""
    if KV == 1:
        numbers = codes.to(tl.float32)
    elif KV == 2:
        numbers = decode_e4m3(codes)
    elif KV == 3:
        numbers = decode_e5m2(codes)
    else:
        numbers = codes
    return numbers.to(dtype)


@triton.jit
def round_trip(x, codes, back, count, KV: tl.constexpr, BLOCK: tl.constexpr):
    """``count`` numbers to codes and back: what the conversions are tested with."""
    places = tl.arange(0, BLOCK)
    encoded = encode(tl.load(x + places, mask=places < count, other=0.0), KV)
    tl.store(codes + places, encoded, mask=places < count)
    tl.store(back + places, widen(encoded, KV, tl.float32), mask=places < count)
