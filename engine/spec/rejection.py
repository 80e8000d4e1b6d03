"""Lossless verification of drafts that were proposed with certainty (n-gram lookup)."""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """What a step emits: the drafts that hold, then one token more.

    ``sampled[i]`` was drawn from the model's own distribution p after the drafts before i; there is one more
    of them than drafts. A draft d that was proposed with certainty is to be accepted with probability p(d),
    and otherwise replaced by a draw from p without d (arXiv:2211.17192, with q(d) = 1). Drawing t from p and
    accepting where t = d does both at once: t = d has probability p(d), and a t that differs is a draw from p
    without d. Under greedy, where p has all its weight on the argmax, this is comparison with the argmax.
    """
    for count, draft in enumerate(drafts):
        if sampled[count] != draft:
            return list(sampled[: count + 1])
    return list(sampled[: len(drafts) + 1])
