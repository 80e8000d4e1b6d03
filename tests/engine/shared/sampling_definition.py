"""What sampling parameters do to a distribution, by their definitions."""

from __future__ import annotations

import torch


def kept_by_definition(
    values: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The distribution after min-p, top-k and top-p, by their definitions, one token at a time."""
    probabilities = (values / temperature).softmax(-1)
    probabilities = torch.where(
        probabilities >= min_p * probabilities.max(), probabilities, torch.zeros_like(probabilities)
    )
    order = probabilities.argsort(descending=True)
    if top_k > 0:
        probabilities[order[top_k:]] = 0
    probabilities /= probabilities.sum()
    mass = 0.0
    for token in order.tolist():
        if mass >= top_p:
            probabilities[token] = 0
        mass += float(probabilities[token])
    return probabilities / probabilities.sum()
