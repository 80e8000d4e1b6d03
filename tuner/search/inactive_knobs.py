"""Changes that have nothing to do, by what the trials saw of the server's resources.

A limit that is never reached is none, and a pool that is never short of room is as good as any larger one:
such configs differ from their neighbours by noise alone, which a search then follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tuner.runs.result import TrialResult
from tuner.search.crashes import Codes, codes_of
from tuner.space.space import Space

MEMORY_FLAG, SEQS_FLAG = "gpu_memory_utilization", "max_num_seqs"
MAX_POOL_SHARE, MAX_SEQS_SHARE = 0.5, 0.75
"""Shares of the KV pool and of the sequence slots that may be taken, at one scrape per second, where none are
short."""


def inactive(space: Space, launched: Sequence[TrialResult], codes: Codes) -> NDArray[np.bool_]:
    """Which of (m, d) configs have another KV pool than the baseline where its size does nothing, or more
    slots where none are short. ``codes``: see ``crashes.codes_of``.
    """
    found = np.zeros(len(codes), dtype=bool)
    told = [r for r in launched if r.measurement is not None]
    own = codes_of(space, space.params(space.baseline))
    at = {axis.name: i for i, axis in enumerate(space.axes)}
    if told and MEMORY_FLAG in at and all(map(_has_room, told)):
        found |= codes[:, at[MEMORY_FLAG]] != own[at[MEMORY_FLAG]]
    if (
        told
        and SEQS_FLAG in at
        and all(_has_places(r, MAX_SEQS_SHARE * space.baseline[SEQS_FLAG]) for r in told)
    ):
        found |= codes[:, at[SEQS_FLAG]] > own[at[SEQS_FLAG]]
    return found


def _has_room(result: TrialResult) -> bool:
    """No request was preempted, and no prefix was found that a smaller pool might have dropped."""
    return (
        _within(result, result.peak_kv_usage, MAX_POOL_SHARE)
        and result.preemptions == 0
        and result.prefix_hits == 0
    )


def _has_places(result: TrialResult, most: float) -> bool:
    return _within(result, result.peak_running, most)


def _within(result: TrialResult, peak: float | None, most: float) -> bool:
    """A trial that was stopped early is too short to know a peak: whole ones say, the baseline's first."""
    return result.status == "stopped" if peak is None else peak <= most
