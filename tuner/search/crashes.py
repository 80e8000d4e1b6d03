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

import numpy as np
from numpy.typing import NDArray

from tuner.runs.result import TrialResult
from tuner.space.space import DRAFTS, SPECULATION, Axis, Config, Space, Value

MEMORY_DIRECTIONS: Mapping[str, int] = {
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
    "out_of_memory": {**MEMORY_DIRECTIONS, "gpu_memory_utilization": +1, "max_cudagraph_capture_size": +1},
    "kv_cache_too_small": {**MEMORY_DIRECTIONS, "gpu_memory_utilization": -1, "max_model_len": +1},
}
"""By the reason of a TargetFailed: the direction in which it gets worse."""
P_NEXT_RUNG_FAILS, DECAY_RUNGS = 0.6, 2.0
"""Chance to fail a rung away from what fails for certain, and the rungs over which it falls to a third."""
UNKNOWN_EFFECT_RUNGS = 2
"""Rungs that a difference counts for whose effect on memory is not known."""
Codes = NDArray[np.int64]
"""A config as one number per axis: the index of its value; -1 where the axis does not exist."""
_REASON = re.compile(rf"\b({'|'.join(CAUSES)}|killed)\b")


def cause_of(reason: str) -> str:
    """A key of CAUSES; "" where what failed did not fail for memory."""
    found = _REASON.search(reason)
    return "" if found is None else found[1].replace("killed", "out_of_memory")


def codes_of(space: Space, params: Mapping[str, Value]) -> Codes:
    """(d,), by the order of the space's axes."""
    return np.array([_code(axis, params) for axis in space.axes])


def _code(axis: Axis, params: Mapping[str, Value]) -> int:
    if axis.name not in params:
        return -1
    value = params[axis.name]
    return int(value) if axis.ordered and isinstance(value, int) else axis.values.index(value)


class Crashes:
    """The region of ``space`` that failures for memory span.

    ``failed``: (config, reason) of servers that did not serve; ``served``: configs that did. A config that
    served although it takes more than a failed one speaks for chance: that failure proves nothing.
    """

    def __init__(
        self, space: Space, failed: Iterable[tuple[Config, str]], served: Iterable[Config] = ()
    ) -> None:
        self._space = space
        self._served = [self._codes(config) for config in served]
        told = ((self._codes(config), cause_of(reason), reason) for config, reason in failed)
        self._failed = [
            (codes, cause, reason)
            for codes, cause, reason in told
            if cause and not any(self._gaps(other, codes, cause) == 0 for other in self._served)
        ]

    @classmethod
    def learnt(cls, space: Space, results: Iterable[TrialResult]) -> Self:
        told = list(results)
        failed = ((r.config, f"trial {r.number} {r.reason}") for r in told if r.status == "failed")
        return cls(space, failed, (r.config for r in told if r.measurement is not None))

    def forbids(self, config: Config) -> str:
        """Why ``config`` would fail too: what failed that took no more memory; "" where it may serve."""
        codes = self._codes(config) if self._failed else None
        return next((why for than, cause, why in self._failed if self._gaps(codes, than, cause) == 0), "")

    def forbidden(self, codes: Codes) -> NDArray[np.bool_]:
        """The same of many, (m, d): whether each would fail."""
        found = np.zeros(len(codes), dtype=bool)
        for than, cause, _ in self._failed:
            found |= self._gaps(codes, than, cause) == 0
        return found

    def chance(self, codes: Codes) -> NDArray[np.float64]:
        """That each of (m, d) serves, in a guess: smaller the fewer rungs it is from what would fail for
        certain.

        1 where nothing failed for memory, and for what takes no more of it than a config that served.
        """
        nearest = np.full(len(codes), math.inf)
        proven: dict[str, NDArray[np.bool_]] = {}
        for than, cause, _ in self._failed:
            if cause not in proven:
                proven[cause] = np.zeros(len(codes), dtype=bool)
                for other in self._served:
                    proven[cause] |= self._gaps(other, codes, cause) == 0
            gaps = np.where(proven[cause], math.inf, self._gaps(codes, than, cause))
            nearest = np.minimum(nearest, gaps)
        return 1.0 - P_NEXT_RUNG_FAILS * np.exp((1 - nearest) / DECAY_RUNGS)

    def _codes(self, config: Config) -> Codes:
        return codes_of(self._space, self._space.params(config))

    def _gaps(self, codes: Any, than: Codes, cause: str) -> Any:
        """Rungs that each is better off than what failed, over all axes; 0: it is nowhere better off.

        Either may be of one config, (d,), or of many, (m, d).
        """
        told = [CAUSES[cause].get(axis.name) for axis in self._space.axes]
        ladder = np.array([bool(d) and axis.ordered for d, axis in zip(told, self._space.axes, strict=True)])
        sign, matters = np.array([d or 0 for d in told]), np.array([d != 0 for d in told])
        rungs = np.maximum(0, sign * (than - codes))
        comparable = ladder & (codes >= 0) & (than >= 0)
        return np.where(comparable, rungs, UNKNOWN_EFFECT_RUNGS * (matters & (codes != than))).sum(axis=-1)
