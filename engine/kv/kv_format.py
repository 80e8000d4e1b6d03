"""How keys and values are stored: as computed, or in a byte a number, with or without scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

SCALE_BYTES = 4
"""Of an fp32 scale."""
SMALLEST_SCALE = 1e-12
"""Keeps a token of zeros from dividing by zero."""


@dataclass(frozen=True)
class KVFormat:
    """What ``--kv-cache-dtype`` names. ``storage`` None: the dtype that the model computes in."""

    name: str
    storage: torch.dtype | None = None
    largest: float | None = None
    """The largest number of the storage type, where it is narrower than what is stored."""
    scaled: bool = False
    """Each token and head has an fp32 scale, for keys and for values: its largest magnitude / ``largest``.
    Without it numbers are stored as they are, those beyond ``largest`` as ``largest`` (vLLM's scale of 1)."""

    @property
    def held_as(self) -> torch.dtype | None:
        """The type of the tensors that hold it: torch cannot index fp8, so that is held as bytes."""
        return torch.uint8 if self.storage in _FP8 else self.storage

    def bytes_per_head(self, head_dim: int, dtype: torch.dtype) -> int:
        """Of one token's key, or value, in one KV head."""
        return head_dim * (self.storage or dtype).itemsize + (SCALE_BYTES if self.scaled else 0)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``x`` [..., head_dim] as stored, and its scales [...] where the format has them."""
        if self.largest is None:
            return x.to(self.storage or x.dtype), None
        if not self.scaled:
            return x.clamp(-self.largest, self.largest).to(self.storage), None
        scales = x.abs().amax(-1).float().div_(self.largest).clamp_(min=SMALLEST_SCALE)
        scaled = x / scales.unsqueeze(-1)
        if self.storage == torch.int8:
            scaled.round_()
        # Division may end a last digit beyond the largest number, which would be infinite.
        return scaled.clamp_(-self.largest, self.largest).to(self.storage), scales

    def dequantize(
        self, stored: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """What :meth:`quantize` was given, rounded; ``stored`` as ``held_as`` has it, with whatever strides.
        The result is contiguous."""
        out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
        if self.storage in _FP8:
            stored, factor = _widen_fp8(stored, *_FP8[self.storage], dtype)
            if scales is None:
                return torch.mul(stored, factor, out=out)
            stored *= factor
        return out.copy_(stored) if scales is None else torch.mul(stored, scales.unsqueeze(-1), out=out)


_FP8 = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}
"""Bits of the fraction, and bias of the exponent."""


def _widen_fp8(
    codes: torch.Tensor, fraction: int, bias: int, dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    """Finite fp8 numbers, given as bytes, in bfloat16 or float32, and what to multiply them by.

    It is 5 times as fast as torch's own conversion.

    Both types have fp32's exponent. So an arithmetic shift moves sign, exponent and fraction to their places,
    leaving copies of the sign to be masked, and the product moves the bias; subnormal numbers come right too.
    """
    whole, shift = (torch.int32, 23 - fraction) if dtype == torch.float32 else (torch.int16, 7 - fraction)
    bits = codes.view(torch.int8).to(whole)
    bits <<= shift
    bits &= (0x7F << shift) + torch.iinfo(whole).min
    return bits.view(dtype), 2.0 ** (127 - bias)


_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_E4M3_MAX, _E5M2_MAX = torch.finfo(_E4M3).max, torch.finfo(_E5M2).max
AUTO = KVFormat("auto")
KV_FORMATS: Mapping[str, KVFormat] = {
    kind.name: kind
    for kind in (
        AUTO,
        KVFormat("bfloat16", torch.bfloat16),
        KVFormat("fp8", _E4M3, _E4M3_MAX),
        KVFormat("fp8_e4m3", _E4M3, _E4M3_MAX),
        KVFormat("fp8_e5m2", _E5M2, _E5M2_MAX),
        KVFormat("fp8_per_token_head", _E4M3, _E4M3_MAX, scaled=True),
        KVFormat("int8_per_token_head", torch.int8, 127.0, scaled=True),
    )
}
"""By vLLM's name."""


def kv_format(name: str, dtype: torch.dtype) -> KVFormat:
    """The format of that name for a model that computes in ``dtype``: AUTO where it changes nothing."""
    found = KV_FORMATS[name]
    return AUTO if found.storage == dtype else found
