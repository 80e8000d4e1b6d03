"""Lossless verification of drafts: the output is distributed as without them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What a step emits: the drafts that hold, then one token more.

    ``sampled[i]`` was drawn from the model's own distribution p after the drafts before i; there is one more
    of them than drafts. A draft d that was proposed with certainty is to be accepted with probability p(d),
    and otherwise replaced by a draw from p without d (arXiv:2211.17192, with q(d) = 1). Drawing t from p and
    accepting where t = d does both at once: t = d has probability p(d), and a t that differs is a draw from p
    without d. Under greedy, where p has all its weight on the argmax, this is comparison with the argmax.

    Drafts that were drawn are compared in the same way with what ``verify`` put into ``sampled``.
    """
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return list(sampled[: count + 1])
    return list(sampled[: len(drafts) + 1])


def verify(
    target: torch.Tensor,
    proposed: torch.Tensor,
    drafts: torch.Tensor,
    to_accept: torch.Tensor,
    to_replace: torch.Tensor,
) -> list[int]:
    """The draft of each row where it is accepted, else another token: never the draft.

    ``drafts`` [R] were drawn from ``proposed`` (q), the model's own distributions are ``target`` (p), both
    [R, vocab]. A draft d is accepted with probability min(1, p(d) / q(d)), and otherwise replaced by a draw
    from max(p - q, 0): what comes out is distributed as p (arXiv:2211.17192, appendix A.1). The uniform
    numbers [R, 1] decide about each.
    """
    columns = drafts.unsqueeze(-1)
    accepted = to_accept * proposed.gather(-1, columns) < target.gather(-1, columns)
    residual = (target - proposed).clamp_(min=0.0)
    # Rounding may leave an almost empty residual with nothing: then p is q, and any draft is right.
    accepted |= residual.sum(-1, keepdim=True) <= 0.0
    replaced, _ = invert(residual, to_replace)
    return torch.where(accepted.squeeze(-1), drafts, replaced).tolist()


def invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row [R, n] the column in which its running sum passes ``uniforms`` [R, 1] times its total,
    and by how much the sum before that column fell short [R, 1]."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    target = uniforms.clamp(0.0, 1.0) * sums[:, -1:]
    columns = torch.searchsorted(sums, target, right=True)
    # Rounding may carry the target to the total itself: then the last column that has any weight.
    last = weights.shape[-1] - 1 - (weights > 0).int().flip(-1).argmax(-1, keepdim=True)
    columns = torch.minimum(columns, last)
    before = sums.gather(-1, columns) - weights.gather(-1, columns)
    return columns.squeeze(-1), target - before
