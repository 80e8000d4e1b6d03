"""RMSNorm, with the residual sum before it where there is one.

A gain of ``1 + weight`` (Gemma) is a weight in fp32 that has the 1 in it. Before a weight in the rows' own
type the normed row is rounded, as in Llama.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wide = tl.load(x + row * x_stride + head * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * WIDTH + columns
        # Rounded as it is stored, so that the norm is of what the next layer reads.
        total = (wide + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, total, mask=inside)
        wide = total.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    found = normed.to(weight.dtype.element_ty).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row * out_stride + head * WIDTH + columns, found.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, residual: torch.Tensor | None = None
) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight``, statistics in fp32; ``out`` may be ``x``.

    ``x`` and ``out`` [T, W], or [T, heads, W] of which each head is normed; only rows may lie apart.
    With ``residual`` [T, W], ``residual += x`` first, and its sum is what is normed.
    """
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    if not len(x):
        return
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x), heads)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=True,
    )


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed rows and the new residual (or ``x``), both fp32."""
    total = x.float() if residual is None else (x.float() + residual.float()).to(residual.dtype).float()
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * weight.float(), total
