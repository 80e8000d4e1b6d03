"""Where servers do not come up: a region learnt from those that did not.

Memory is monotone: what takes more of everything than a config that ran out of memory runs out of it too, so
it is refused without a launch. A pool of KV blocks that is too small is the same thing the other way round in
``gpu_memory_utilization``. Which of the two it was the failure's reason says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from tuner.runs.result import TrialResult
from tuner.space.space import DRAFTS, SPECULATION, Config, Space, Value

HUNGRY: Mapping[str, int] = {
    "max_num_batched_tokens": +1,
    "max_num_seqs": +1,
    DRAFTS: +1,
    f"{SPECULATION}.prompt_lookup_min": 0,
    f"{SPECULATION}.prompt_lookup_max": 0,
    "block_size": 0,
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
    "scheduling_policy": 0,
    "api_server_count": 0,
}
"""Whether more of it takes more memory (+1) or changes nothing (0); of all others only equals compare."""
CAUSES: Mapping[str, Mapping[str, int]] = {
    "out_of_memory": {**HUNGRY, "gpu_memory_utilization": +1, "max_cudagraph_capture_size": +1},
    "kv_cache_too_small": {**HUNGRY, "gpu_memory_utilization": -1, "max_model_len": +1},
}
"""By the reason of a TargetFailed: the direction in which it gets worse."""
NEXT_DOOR, REACH = 0.6, 2.0
"""Chance to fail a rung away from what fails for certain, and the rungs over which it falls to a third."""
OTHERWISE = 2
"""Rungs that a difference counts for whose effect on memory nobody told."""
_REASON = re.compile(rf"\b({'|'.join(CAUSES)}|killed)\b")


def cause_of(reason: str) -> str:
    """A key of CAUSES; "" where what failed did not fail for memory."""
    found = _REASON.search(reason)
    return "" if found is None else found[1].replace("killed", "out_of_memory")


class Crashes:
    """The region of ``space`` that failures for memory span.

    ``failed``: (config, reason) of servers that did not serve; ``served``: configs that did. A config that
    served although it takes more than a failed one speaks for chance: that failure proves nothing.
    """

    def __init__(
        self, space: Space, failed: Iterable[tuple[Config, str]], served: Iterable[Config] = ()
    ) -> None:
        self._space = space
        self._served = good = [space.params(config) for config in served]
        told = ((space.params(config), cause_of(reason), reason) for config, reason in failed)
        self._failed = [
            (params, cause, reason)
            for params, cause, reason in told
            if cause and not any(self._worse(other, params, cause) for other in good)
        ]

    @classmethod
    def learnt(cls, space: Space, results: Iterable[TrialResult]) -> Self:
        told = list(results)
        failed = ((r.config, f"trial {r.number} {r.reason}") for r in told if r.status == "failed")
        return cls(space, failed, (r.config for r in told if r.measurement is not None))

    def forbids(self, config: Config) -> str:
        """Why ``config`` would fail too: what failed that took no more memory; "" where it may serve."""
        if not self._failed:
            return ""
        params = self._space.params(config)
        return next((why for failed, cause, why in self._failed if self._worse(params, failed, cause)), "")

    def chance(self, config: Config) -> float:
        """That ``config`` serves, in a guess: smaller the fewer rungs it is from what would fail for certain.

        1 where nothing failed for memory, and for what takes no more of it than a config that served.
        """
        params = self._space.params(config)
        gaps = [
            self._gap(params, failed, cause)
            for failed, cause, _ in self._failed
            if not any(self._worse(other, params, cause) for other in self._served)
        ]
        return 1.0 - NEXT_DOOR * math.exp((1 - min(gaps, default=math.inf)) / REACH)

    def _gap(self, params: Mapping[str, Value], failed: Mapping[str, Value], cause: str) -> int:
        """Rungs that ``params`` are better off than what failed, over all axes."""
        gap = 0
        for axis in self._space.axes:
            value, than = params.get(axis.name), failed.get(axis.name)
            direction = CAUSES[cause].get(axis.name)
            if direction and isinstance(value, int) and isinstance(than, int):
                gap += max(0, direction * (than - value))
            elif not _no_better(value, than, direction):
                gap += OTHERWISE
        return gap

    def _worse(self, params: Mapping[str, Value], than: Mapping[str, Value], cause: str) -> bool:
        """Whether ``params`` are nowhere better off than ``than``."""
        worse = CAUSES[cause]
        return all(
            _no_better(params.get(axis.name), than.get(axis.name), worse.get(axis.name))
            for axis in self._space.axes
        )


def _no_better(value: Any, than: Any, direction: int | None) -> bool:
    if direction == 0:
        return True
    if direction is None or value is None or than is None:
        return bool(value == than)
    return bool(direction * (value - than) >= 0)
