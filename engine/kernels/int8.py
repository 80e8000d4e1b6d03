"""Linear layers in int8: weights per output channel ahead, activations per token as they come. All symmetric.

    y[t, n] = scale[t] * scale[n] * sum_k round(x[t, k] / scale[t]) * round(w[n, k] / scale[n])

Each scale is the largest magnitude of its row / 127, and the sum is of integers, exact.
"""

from __future__ import annotations

import torch

from engine.kernels.base import Linear

LARGEST = 127.0
SMALLEST_SCALE = 1e-30
"""Keeps a row of zeros from dividing by zero."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [R, K] as int8, and the fp32 scales [R, 1] that it is to be multiplied with."""
    wide = x.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    return (wide / scales).round_().to(torch.int8), scales


class Int8Linear(Linear):
    """With torch operations: the reference, and for machines without the C++ kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, scales = quantise_rows(weight)
        self._scales, self._bias = scales.T, bias
        self.out_features = weight.shape[0]
        self.nbytes = self.weight.nbytes + scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, K] -> fp32 [T, N]."""
        rows, scales = quantise_rows(x)
        y = torch._int_mm(rows, self.weight.T).float() * (scales * self._scales)
        return y if self._bias is None else y + self._bias
