"""The gate of the MLP: SiLU (Llama, Qwen) or tanh-approximated GELU (Gemma), times the other half."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

BLOCK = 1024

Activation = Literal["silu", "gelu_tanh"]


@triton.jit
def tanh(x):
    """By exp of a negative number, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _gate_mul(gate_up, out, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # 0.7978845608 = sqrt(2 / pi), arXiv:1606.08415
        active = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        small = tl.exp(-tl.abs(gate))
        active = gate * tl.where(gate < 0.0, small, 1.0) / (1.0 + small)
    tl.store(out + row * WIDTH + columns, (active * up).to(out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
    """``out[T, I] = activation(gate) * up`` of contiguous rows ``[gate (I) | up (I)]``."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _gate_mul[grid](
            gate_up, out, WIDTH=width, GELU=activation == "gelu_tanh", BLOCK=BLOCK, enable_fp_fusion=True
        )


def gate_mul_reference(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
